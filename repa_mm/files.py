"""Files that are written whole or not at all."""

import errno
import os
import os.path as osp
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# A full disk, a quota, a limit.
_NO_SPACE = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_TEMPORARY = '.incomplete-'


@contextmanager
def naming_full_disk(path: str, temporary: str | None = None) -> Iterator[None]:
    """Let the errors of a full disk, which name no file, name this one.

    Args:
        path (str): A file or folder.
        temporary (str, optional): What is written in its place. Then the errors of a broken disk
            name ``path``, too.

    Raises:
        OSError: If there is no space.
    """
    try:
        yield
    except OSError as error:
        is_broken = temporary and error.errno in (errno.EIO, errno.EROFS)
        if error.filename in (None, temporary) and (error.errno in _NO_SPACE or is_broken):
            raise OSError(f'cannot write {path!r}: {error.strerror}') from error
        raise


def check_writable(folder: str) -> None:
    """Check that files can be written to a folder, there or yet to be made; an OSError if not."""
    nearest = osp.abspath(folder)
    while not osp.lexists(nearest):
        nearest = osp.dirname(nearest)
    try:
        remove_strays(nearest)
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
    if len(os.fsencode(osp.basename(path))) > 200:  # 255 with the temporary file's prefix
        raise OSError(f'the name of the output {path!r} is too long')
    check_writable(osp.dirname(osp.realpath(path)))


@contextmanager
def replacing(path: str, suffix: str | None = None) -> Iterator[str]:
    """Yield a temporary path beside ``path``, renamed to it on success.

    An error or a signal leaves ``path`` as it was and no other file. What a killed process leaves,
    the next one that writes to the folder removes. Several processes may write the same file: the
    last one's is there, whole.

    Args:
        path (str): The file to write.
        suffix (str, optional): That of the temporary path. Defaults to the suffix of ``path``, by
            which many writers choose a format.

    Raises:
        OSError: If it cannot be written.
    """
    if osp.exists(path) and not osp.isfile(path):
        raise OSError(f'cannot write {path!r}: it is not a file')
    # A link stays one.
    target = osp.realpath(path)
    folder, name = osp.split(target)
    if suffix is not None:
        name = osp.splitext(name)[0] + suffix
    try:
        os.makedirs(folder, exist_ok=True)
        remove_strays(folder)
        handle, temporary = _locked_file(folder, name)
    except OSError as error:
        raise OSError(f'cannot write {path!r}: {error.strerror or error}') from error
    try:
        with naming_full_disk(path, temporary):
            yield temporary
            if handle:
                os.fsync(handle)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    finally:
        if handle:
            os.close(handle)


def write_bytes(path: str, content: bytes | memoryview) -> None:
    """Write a file, whole or not at all; an OSError if it cannot be written."""
    # A stray must not look like a checkpoint.
    with replacing(path, suffix='') as temporary, open(temporary, 'wb') as file:
        file.write(content)


def remove_strays(folder: str) -> None:
    """Remove the temporary files that killed processes have left in a folder."""
    for entry in os.scandir(folder) if fcntl and osp.isdir(folder) else ():
        if not entry.name.startswith(_TEMPORARY):
            continue
        # Another user's, one that is gone, or one that a process is writing.
        with suppress(OSError), open(entry.path, 'r+b') as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(entry.path)


def _locked_file(folder: str, name: str) -> tuple[int | None, str]:
    """A new file that no other process takes for a stray as long as it is open."""
    while True:
        handle, path = tempfile.mkstemp(dir=folder, prefix=_TEMPORARY, suffix=f'-{name}')
        if not fcntl:  # an open file could not be renamed
            os.close(handle)
            return None, path
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, path
        # Another process removed the file before it was locked.
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
