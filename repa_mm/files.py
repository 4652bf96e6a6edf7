"""Writing files without surprises."""

import errno
import os
import os.path as osp
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

# A quota, a limit or a full or broken disk.
_NO_SPACE = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO, errno.EROFS)


def check_writable(folder: str) -> None:
    """Check that files can be written to a folder, there or yet to be made.

    Raises:
        OSError: If not.
    """
    nearest = osp.abspath(folder)
    while not osp.lexists(nearest):
        nearest = osp.dirname(nearest)
    try:
        # A full disk has room for a file, and not for what is in it.
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(bytes(65536))
    except OSError as error:
        raise OSError(f'cannot write to {folder!r}: {error.strerror}') from error


def check_output(path: str | None, *inputs: str | None) -> None:
    """Check that a file can be written, or replaced.

    Args:
        path (str, optional): The file. None is fine.
        *inputs (str, optional): Files that it must not replace.

    Raises:
        OSError: If it cannot.
        ValueError: If it is one of the inputs.
    """
    if path is None:
        return
    if osp.isdir(path):
        raise IsADirectoryError(f'the output {path!r} is a folder: name a file')
    if osp.exists(path) and not osp.isfile(path):
        # Renaming would replace the device, as /dev/null.
        raise OSError(f'the output {path!r} is a device or a pipe: name a file')
    for other in filter(None, inputs):
        if osp.realpath(path) == osp.realpath(other):
            raise ValueError(f'the output {path!r} is the input: choose another name')
    if len(os.fsencode(osp.basename(path))) > 200:  # 255 with a suffix
        raise OSError(f'the name of the output {path!r} is too long')
    check_writable(osp.dirname(osp.realpath(path)))


@contextmanager
def replacing(path: str) -> Iterator[str]:
    """Yield a temporary path beside ``path``, renamed to it on success.

    An interrupted write leaves neither a damaged nor a stray file.

    Raises:
        OSError: If it cannot be written.
    """
    if osp.exists(path) and not osp.isfile(path):
        raise OSError(f'cannot write {path!r}: it is not a file')
    # A link stays one.
    target = osp.realpath(path)
    folder = osp.dirname(target)
    try:
        os.makedirs(folder, exist_ok=True)
        handle, temporary = tempfile.mkstemp(
            dir=folder, prefix=f'.{osp.basename(target)}.', suffix=osp.splitext(path)[1]
        )
    except OSError as error:
        raise OSError(f'cannot write {path!r}: {error.strerror or error}') from error
    os.close(handle)
    try:
        yield temporary
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException as error:
        os.unlink(temporary)
        if getattr(error, 'errno', None) in _NO_SPACE:
            raise OSError(f'cannot write {path!r}: {error.strerror}') from error
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
