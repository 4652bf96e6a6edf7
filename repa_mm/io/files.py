"""Writing files completely or not at all."""

import os
import os.path as osp
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def replacing(path: str) -> Iterator[str]:
    """Yield a temporary path beside ``path`` with the same suffix, and rename it on success.

    After an error or a signal, ``path`` is as it was before. Missing folders are created.
    """
    folder, name = osp.split(osp.realpath(path))  # a symbolic link stays a link
    os.makedirs(folder, exist_ok=True)
    temporary = osp.join(folder, f'.{os.getpid()}-{name}')
    try:
        yield temporary
        os.replace(temporary, osp.join(folder, name))
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


def write_text(path: str, text: str) -> None:
    """Write a text file, see :func:`replacing`."""
    write_bytes(path, text.encode())


def write_bytes(path: str, content: bytes) -> None:
    """Write a file, see :func:`replacing`."""
    with replacing(path) as temporary, open(temporary, 'wb') as file:
        file.write(content)
