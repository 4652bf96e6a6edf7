"""Reading checkpoints without running code that is in them."""

import argparse
import copy
import os
import os.path as osp
import pickle
import re
import types
import zipfile
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from mmap import ACCESS_READ, mmap
from typing import Any

import torch
from mmengine.runner.checkpoint import CheckpointLoader
from mmengine.utils import digit_version

from repa_mm.reparam import CheckpointError

HOW_TO_GET_WEIGHTS = (
    'Convert released weights (huggingface.co/Ackesnal/RePaViT) with '
    'tools/model_converters/repavit_to_mm.py, or train the backbone on '
    'ImageNet-1k first (configs/repa_*_in1k.py), and put the file there or '
    'set model.backbone.init_cfg.checkpoint to its path. To train without '
    'pretrained weights: tools/train.py CONFIG --from-scratch'
)


def is_remote(path: str) -> bool:
    """Whether a path is a URL or has another MMEngine prefix."""
    return '://' in path


def check_pretrained(init_cfg: dict | list | None) -> None:
    """Check that the local files an ``init_cfg`` loads from exist.

    Raises:
        FileNotFoundError: Naming the file, and what to do.
    """
    for cfg in init_cfg if isinstance(init_cfg, (list, tuple)) else [init_cfg]:
        path = cfg.get('checkpoint') if isinstance(cfg, dict) else None
        if path and not is_remote(path) and not osp.isfile(path):
            raise FileNotFoundError(f'no pretrained weights at {path!r}. {HOW_TO_GET_WEIGHTS}')


@cache
def _safe_globals() -> list:
    """What MMEngine and timm's scripts write into checkpoints besides tensors."""
    import numpy as np
    from mmengine.logging import HistoryBuffer

    try:
        multiarray = import_module('numpy._core.multiarray')
    except ImportError:  # before NumPy 1.26
        multiarray = import_module('numpy.core.multiarray')

    def method(owner: type, name: str):
        # Methods are pickled as getattr(class, name), which is allowed for
        # the one class that is pickled with its methods.
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

    return [
        argparse.Namespace,
        HistoryBuffer,
        (method, 'builtins.getattr'),
        (encode, '_codecs.encode'),
        np.ndarray,
        (dtype, 'numpy.dtype'),
        multiarray._reconstruct,
        multiarray.scalar,
        slice,
        *{type(np.dtype(char)) for char in 'bBhHiIlLqQefd?'},
    ]


class _Inert:
    """Stands for any object that is not to be built."""

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return self

    def __setstate__(self, state):
        pass


def _old_name(path: str) -> str:
    """The name that Python 2 and NumPy 1 had for something."""
    return path.replace('numpy._core', 'numpy.core').replace('builtins.', '__builtin__.')


class _TensorUnpickler(pickle._Unpickler):
    """Builds tensors, and what MMEngine saves; anything else becomes inert.

    For torch before 2.6, whose ``weights_only`` refuses MMEngine's checkpoints
    and cannot be told what to accept. In Python, since the one in C takes
    gigabytes when a few bytes of a hostile file ask for them.
    """

    def find_class(self, module: str, name: str):
        for safe in _safe_globals():
            safe, path = (
                safe
                if isinstance(safe, tuple)
                else (safe, f'{safe.__module__}.{safe.__qualname__}')
            )
            if _old_name(path) == _old_name(f'{module}.{name}'):
                return safe
        if (
            module == 'torch._utils'
            and name.startswith('_rebuild')
            or module == 'torch.storage'
            and name == 'UntypedStorage'
            or module == 'torch'
            and (
                name.endswith('Storage')
                or name in ('Size', 'device')
                or isinstance(getattr(torch, name, None), torch.dtype)
            )
            or (module, name) in (('collections', 'OrderedDict'), ('argparse', 'Namespace'))
        ):
            return super().find_class(module, name)
        return _Inert


_tensor_pickle = types.ModuleType('tensor_pickle', 'see _TensorUnpickler')


_tensor_pickle.Unpickler = _TensorUnpickler


_tensor_pickle.load = lambda file, **kwargs: _TensorUnpickler(file, **kwargs).load()


def check_size(path: str) -> bool:
    """Check that a file holds no more than its size: no bomb.

    Returns:
        bool: Whether it is a zip archive, as torch writes since 1.6.

    Raises:
        CheckpointError: If the file is empty, neither an archive nor a pickle,
            or an archive that torch has not written or that is damaged.
    """
    size = osp.getsize(path)
    with open(path, 'rb') as file:
        start = file.read(2)
    if not start:
        raise CheckpointError(f'{path!r} is empty')
    if start != b'PK':
        if start[:1] != b'\x80':
            raise CheckpointError(
                f'{path!r} is no checkpoint: it begins with '
                f'{start!r}, as neither a zip archive nor a '
                'pickle does'
            )
        with open(path, 'rb') as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            _check_pickle(content, path)
        return False
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f'{path!r} is truncated: the end of the file is missing')
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            pickles = [
                archive.read(record)
                for record in records
                if record.filename.endswith('data.pkl')
                and record.compress_type == zipfile.ZIP_STORED
                and record.file_size <= size
            ]
    except Exception as error:
        raise CheckpointError(f'{path!r} is a damaged archive: {error}') from error
    if any(record.filename.endswith('/constants.pkl') for record in records):
        raise CheckpointError(f'{path!r} is a TorchScript archive, not a checkpoint')
    declared = sum(record.file_size for record in records)
    if declared > size or any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise CheckpointError(
            f'{path!r} is refused: its {size:,} bytes hold compressed parts, '
            f'which are to become {declared:,}; torch.save compresses nothing'
        )
    for content in pickles:
        _check_pickle(content, path)
    return True


def _check_pickle(content: bytes | mmap, path: str) -> None:
    # The one thing that torch lets a pickle make in any size.
    if content.find(b'\nbytearray\n') >= 0:
        raise CheckpointError(f'{path!r} is refused: it makes a bytearray, which no checkpoint has')


def _tensors(value: Any, seen: set) -> Iterator[torch.Tensor]:
    """All tensors in containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item, seen)


def _load_safetensors(path: str) -> dict:
    """The tensors of a file in Hugging Face's format."""
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise CheckpointError(
            f'{path!r} needs a package to be read: pip install safetensors'
        ) from error
    try:
        return load_file(path)
    except Exception as error:
        raise CheckpointError(
            f'{path!r} is not a readable safetensors file, perhaps damaged ({error})'
        ) from error


def load_checkpoint(path: str, keys: Sequence[str] = ('state_dict',)) -> dict:
    """Read a checkpoint onto the CPU, without running code that is in it.

    Args:
        path (str): A file with a state dict, alone or under one of ``keys``;
            with the suffix .safetensors, one of that format. It must not
            change while the tensors are in use: they are read only as far as
            they are used.
        keys (Sequence[str]): The first of these that is there has the state
            dict. Defaults to ('state_dict', ).

    Returns:
        dict: The checkpoint with, at least, 'state_dict'.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If the file is damaged, holds other objects than
            tensors and what MMEngine saves, more than its size allows, or no
            state dict.
    """
    if not osp.isfile(path):
        kind = 'folder' if osp.isdir(path) else 'device or pipe' if osp.exists(path) else ''
        raise FileNotFoundError(f'no checkpoint at {path!r}' + (kind and f': it is a {kind}'))
    if path.endswith('.safetensors'):
        state_dict = _load_safetensors(path)
        if not state_dict:
            raise CheckpointError(f'{path!r} holds no tensor')
        return dict(state_dict=state_dict)
    # torch maps zip files only. Those that it reads whole, torch 2.1 reads
    # beyond the end of what they hold.
    mapped = check_size(path)
    try:
        if digit_version(torch.__version__) >= digit_version('2.6'):
            with torch.serialization.safe_globals(_safe_globals()):
                checkpoint = torch.load(path, map_location='cpu', weights_only=True, mmap=mapped)
        else:
            checkpoint = torch.load(
                path, map_location='cpu', pickle_module=_tensor_pickle, mmap=mapped
            )
    except pickle.UnpicklingError as error:
        reason = re.search(r'Unsupported (global: GLOBAL \S+|operand \d+)', str(error))
        raise CheckpointError(
            f'{path!r} is damaged, or holds objects other than tensors that '
            'are not loaded from a file that may be hostile '
            f'({reason[0] if reason else "weights_only=True refuses it"})'
        ) from error
    except Exception as error:
        # torch raises whatever the damaged bytes happen to lead to.
        text = ' '.join(str(error).split())[:100]
        raise CheckpointError(
            f'{path!r} is not a readable checkpoint, perhaps damaged '
            f'({type(error).__name__}: {text})'
        ) from error
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f'{path!r} holds a {type(checkpoint).__name__}, not a checkpoint')
    key = next((key for key in keys if key in checkpoint), None)
    if key != 'state_dict':
        checkpoint = dict(
            checkpoint if key else {}, state_dict=checkpoint[key] if key else checkpoint
        )
    state_dict = checkpoint['state_dict']
    if not (
        isinstance(state_dict, dict)
        and state_dict
        and all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in state_dict.items())
    ):
        hint = ''
        if key is None and isinstance(state_dict.get('model'), dict):
            hint = (
                " ('model' may be one of another layout, see "
                'tools/model_converters/repavit_to_mm.py)'
            )
        raise CheckpointError(
            f'{path!r} holds no state dict: expected names with tensors, alone'
            f' or under {" or ".join(map(repr, keys))}{hint}'
        )
    for tensor in _tensors(checkpoint, set()):
        # A view of one number may have any shape, and grows when computed with.
        if (
            tensor.layout != torch.strided
            or tensor.device.type != 'cpu'
            or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes()
        ):
            raise CheckpointError(
                f'{path!r} is refused: it declares a tensor of shape '
                f'{tuple(tensor.shape)} without holding all its values'
            )
    return checkpoint


def load_from_local(filename: str, map_location: Any = None) -> dict:
    """How MMEngine is to load local files, see :func:`load_safely`."""
    # A copy: the file may be replaced while a training uses its tensors.
    return copy.deepcopy(load_checkpoint(osp.expanduser(filename)))


def load_safely() -> None:
    """Let MMEngine load local files with :func:`load_checkpoint`.

    It would run the code in a pickle, at once or where loading without fails.
    """
    CheckpointLoader.register_scheme('', load_from_local, force=True)


def find_latest(work_dir: str) -> str | None:
    """The checkpoint with which a training that was stopped goes on.

    It is the one that ``last_checkpoint`` names. That file may be a moment
    behind, empty or of another place if the training was killed or moved: then
    the latest complete one of the folder.

    Args:
        work_dir (str): Where the training wrote its checkpoints.

    Returns:
        str | None: Its path; None if there is none.

    Raises:
        CheckpointError: If there are some, and none is complete.
    """
    named = []
    pointer = osp.join(work_dir, 'last_checkpoint')
    if osp.isfile(pointer):
        with open(pointer, errors='replace') as file:
            path = file.read().strip()
        if is_remote(path):
            return path
        named = [path, osp.join(work_dir, osp.basename(path))]
    steps = []
    for name in os.listdir(work_dir) if osp.isdir(work_dir) else []:
        match = re.fullmatch(r'(?:epoch|iter)_(\d+)\.pth', name)
        if match:
            steps.append((int(match[1]), osp.join(work_dir, name)))
    found = [path for path in named if osp.isfile(path)]
    found += [path for _, path in sorted(steps, reverse=True)]
    error = None
    for path in found:
        try:
            load_checkpoint(path)
            return path
        except CheckpointError as e:
            error = error or e
    if error:
        raise CheckpointError(f'nothing to resume from: {error}')
    return None
