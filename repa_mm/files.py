"""Files that are written whole or not at all."""

import os
import os.path as osp
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def replacing(path: str) -> Iterator[str]:
    """Yield a temporary path beside ``path``, with the same suffix, renamed to it on success.

    An error or a signal leaves ``path`` as it was. The folder is made.
    """
    folder, name = osp.split(osp.realpath(path))  # a link stays one
    os.makedirs(folder, exist_ok=True)
    temporary = osp.join(folder, f'.{os.getpid()}-{name}')
    try:
        yield temporary
        os.replace(temporary, osp.join(folder, name))
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
