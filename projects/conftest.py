"""What the tests of all projects share with those of the package."""

from tests.conftest import (  # noqa: F401
    _instances,
    _seed,
    _unformatted_configs,
    randomize,
    relative_error,
    run_tool,
)
