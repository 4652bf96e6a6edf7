"""What the tests of all projects share with those of the package."""

from tests.conftest import _instances, _seed, _unformatted_configs, randomize, relative_error  # noqa: F401
