"""Packages that conversions, comparisons and timings need beside PyTorch and OpenMMLab's."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def of_extra() -> Iterator[None]:
    """Say how to install the packages of the extra 'speed_up' if an import fails."""
    try:
        yield
    except ImportError as error:
        hint = f'{error}: install it, or all for speed_up: pip install -e ".[speed_up]"'
        raise ImportError(hint, name=error.name) from error
