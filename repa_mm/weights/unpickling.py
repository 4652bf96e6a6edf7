"""Reading files of ``torch.save`` without running code that is in them."""

import argparse
import io
import os.path as osp
import pickle
import re
import types
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import torch
from mmengine.utils import digit_version

from repa_mm.reparam import CheckpointError

# A pickle of tensors has their names and shapes, and not their values.
_LARGEST_PICKLE = 2**28
# What the unpickler for old versions of torch builds besides what MMEngine saves.
_ORDINARY = (
    r'torch\._utils\._rebuild\w*|torch\.storage\.UntypedStorage|torch\.(\w*Storage|Size|device)|'
    r'collections\.(OrderedDict|Counter)|(__builtin__|builtins)\.(set|complex)'
)


def load_tensors(path: str) -> Any:
    """Read a file of ``torch.save`` onto the CPU, without running code that is in it.

    Args:
        path (str): The file. It must not change while its tensors are in use: their values are
            read when they are used.

    Returns:
        What was saved.

    Raises:
        CheckpointError: If the file is damaged, holds other objects than tensors and what MMEngine
            saves, or more than its size allows.
    """
    if digit_version(torch.__version__) >= digit_version('2.6'):
        allowed = [(value, name) for name, value in _safe_globals().items()]
        safely = torch.serialization.safe_globals(allowed)
        kwargs = dict(map_location='cpu', weights_only=True)
    else:
        safely = nullcontext()
        kwargs = dict(map_location='cpu', pickle_module=_tensor_pickle)
    try:
        with safely, _PickleFile(io.FileIO(path)) as file:
            # torch maps archives only, and those by name.
            if _is_archive(file, path):
                content = torch.load(path, mmap=True, **kwargs)
            else:
                content = torch.load(file, **kwargs)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        reason = re.search(r'Unsupported (global: GLOBAL \S+|operand \d+)', str(error))
        raise CheckpointError(
            f'{path!r} is damaged, or holds objects other than tensors that are not loaded from a '
            f'file that may be hostile ({reason[0] if reason else "weights_only=True refuses it"})'
        ) from error
    except Exception as error:
        # torch raises whatever the damaged bytes happen to lead to.
        text = ' '.join(str(error).split())[:100]
        raise CheckpointError(
            f'{path!r} is not a readable checkpoint, perhaps damaged '
            f'({type(error).__name__}: {text})'
        ) from error
    for tensor in _tensors(content, set()):
        if tensor.is_nested or tensor.layout != torch.strided:
            kind = 'nested' if tensor.is_nested else 'sparse'
            raise CheckpointError(
                f'{path!r} is refused: it holds a {kind} tensor, which no model loads'
            )
        # A view of one number may have any shape, and grows when computed with.
        if (
            tensor.device.type != 'cpu'
            or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes()
        ):
            raise CheckpointError(
                f'{path!r} is refused: it declares a tensor of shape {tuple(tensor.shape)} '
                'without holding all its values'
            )
    return content


def _tensors(value: Any, seen: set) -> Iterator[torch.Tensor]:
    """All tensors in containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item, seen)


class _PickleFile(io.BufferedReader):
    """A file whose pickles are of moderate size and make no bytearray.

    torch reads the values of tensors past this class, from the file's descriptor.
    """

    _left = _LARGEST_PICKLE

    def read(self, size: int | None = -1) -> bytes:
        most = self._left + 1
        return self._counted(super().read(most if size is None or size < 0 else min(size, most)))

    def readline(self, size: int = -1) -> bytes:
        # A line has the name of a class, which ends up in messages.
        return self._counted(super().readline(1000))

    def _counted(self, content: bytes) -> bytes:
        self._left -= len(content)
        if self._left < 0:
            raise CheckpointError(
                f'{self.name!r} is refused: a part other than the values of tensors has more than '
                f'{_LARGEST_PICKLE >> 20} MiB, which no checkpoint has'
            )
        _check_pickle(content, self.name)
        return content


def _check_pickle(content: bytes, path: str) -> None:
    # The one thing that torch lets a pickle make in any size.
    if b'bytearray\n' in content:
        raise CheckpointError(f'{path!r} is refused: it makes a bytearray, which no checkpoint has')


def _is_archive(file: _PickleFile, path: str) -> bool:
    """Whether a file is a zip archive, as torch writes since 1.6, and not a pickle.

    Raises:
        CheckpointError: If the file is neither, or an archive that torch has not written, that is
            damaged, or that holds more than its size.
    """
    start = file.peek(2)[:2]
    if not start:
        raise CheckpointError(f'{path!r} is empty')
    if start != b'PK':
        if start[:1] != b'\x80':
            raise CheckpointError(
                f'{path!r} is no checkpoint: it begins with {start!r}, as neither a zip archive '
                'nor a pickle does'
            )
        return False
    if not zipfile.is_zipfile(file):
        raise CheckpointError(f'{path!r} is truncated: the end of the file is missing')
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        if any(record.filename.endswith('/constants.pkl') for record in records):
            raise CheckpointError(f'{path!r} is a TorchScript archive, not a checkpoint')
        size, declared = osp.getsize(path), sum(record.file_size for record in records)
        if declared > size or any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise CheckpointError(
                f'{path!r} is refused: its {size:,} bytes hold compressed parts, '
                f'which are to become {declared:,}; torch.save compresses nothing'
            )
        for record in records:
            if record.filename.endswith('data.pkl'):
                _check_pickle(archive.read(record), path)
    return True


@cache
def _safe_globals() -> dict[str, Any]:
    """What MMEngine and timm's scripts write into checkpoints besides tensors, by its name."""
    import numpy as np
    from mmengine.logging import HistoryBuffer

    try:
        multiarray = import_module('numpy._core.multiarray')
    except ImportError:  # before NumPy 1.26
        multiarray = import_module('numpy.core.multiarray')

    def method(owner: type, name: str):
        # Methods are pickled as getattr(class, name), which is allowed for the one class that is
        # pickled with its methods.
        if owner is not HistoryBuffer:
            raise pickle.UnpicklingError(f'getattr of {owner}')
        return getattr(owner, name)

    def dtype(code: str, *args):
        # One value of another type may be gigabytes large.
        if not re.fullmatch('[biuf][1248]', str(code)):
            raise pickle.UnpicklingError(f'dtype {code}')
        return np.dtype(code, *args)

    def encode(text: str, codec: str) -> bytes:
        # How protocol 2 writes bytes.
        if codec != 'latin1':
            raise pickle.UnpicklingError(f'codec {codec}')
        return text.encode(codec)

    numbers = {type(np.dtype(char)) for char in 'bBhHiIlLqQefd?'}
    own = (argparse.Namespace, HistoryBuffer, np.ndarray, slice, *numbers)
    return {
        **{f'{kind.__module__}.{kind.__qualname__}': kind for kind in own},
        'builtins.getattr': method,
        '_codecs.encode': encode,
        'numpy.dtype': dtype,
        f'{multiarray.__name__}._reconstruct': multiarray._reconstruct,
        f'{multiarray.__name__}.scalar': multiarray.scalar,
    }


def _old_name(path: str) -> str:
    """The name that Python 2 and NumPy 1 had for something."""
    return path.replace('numpy._core', 'numpy.core').replace('builtins.', '__builtin__.')


class _TensorUnpickler(pickle._Unpickler):
    """Builds tensors, and what MMEngine saves; anything else is refused.

    It serves torch before 2.6, whose ``weights_only`` refuses MMEngine's checkpoints and cannot be
    told what to accept. It is in Python, since the unpickler in C takes gigabytes when a few bytes
    of a hostile file ask for them.
    """

    dispatch = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if code != pickle.BYTEARRAY8[0]
    }

    def find_class(self, module: str, name: str):
        path = f'{module}.{name}'
        for safe, value in _safe_globals().items():
            if _old_name(safe) == _old_name(path):
                return value
        is_ordinary = re.fullmatch(_ORDINARY, path) or (
            module == 'torch' and isinstance(getattr(torch, name, None), torch.dtype)
        )
        if not is_ordinary:
            raise pickle.UnpicklingError(f'Unsupported global: GLOBAL {path}')
        return super().find_class(module, name)


_tensor_pickle = types.SimpleNamespace(
    __name__='tensor_pickle',
    Unpickler=_TensorUnpickler,
    load=lambda file, **kwargs: _TensorUnpickler(file, **kwargs).load(),
)
