"""Reading and writing checkpoints without surprises."""
import argparse
import os
import os.path as osp
import pickle
import re
import tempfile
import types
import zipfile
from contextlib import contextmanager
from typing import Iterator, Optional, Sequence, Union

import torch
from mmengine.utils import digit_version

from ..reparam import CheckpointError

HOW_TO_GET_WEIGHTS = (
    'Convert released weights (huggingface.co/Ackesnal/RePaViT) with '
    'tools/model_converters/repavit_to_mm.py, or train the backbone on '
    'ImageNet-1k first (configs/repa_*_in1k.py), and put the file there or '
    'set model.backbone.init_cfg.checkpoint to its path. To train without '
    'pretrained weights: tools/train.py CONFIG --from-scratch')


def is_remote(path: str) -> bool:
    """Whether a path is a URL or has another MMEngine prefix."""
    return '://' in path


def check_pretrained(init_cfg: Union[dict, list, None]) -> None:
    """Check that the local files an ``init_cfg`` loads from exist.

    Raises:
        FileNotFoundError: Naming the file, and what to do.
    """
    for cfg in init_cfg if isinstance(init_cfg, (list, tuple)) else [init_cfg]:
        path = cfg.get('checkpoint') if isinstance(cfg, dict) else None
        if path and not is_remote(path) and not osp.isfile(path):
            raise FileNotFoundError(
                f'no pretrained weights at {path!r}. {HOW_TO_GET_WEIGHTS}')


def _safe_globals() -> list:
    """What MMEngine and timm's scripts write into checkpoints besides tensors.
    """
    import numpy as np
    from mmengine.logging import HistoryBuffer

    def method(owner: type, name: str):
        # Methods are pickled as getattr(class, name), which is allowed for
        # the one class that is pickled with its methods.
        if owner is not HistoryBuffer:
            raise pickle.UnpicklingError(f'getattr of {owner}')
        return getattr(owner, name)

    core = getattr(np, '_core', None) or np.core
    return [
        argparse.Namespace, HistoryBuffer, (method, 'builtins.getattr'),
        np.ndarray, np.dtype,
        core.multiarray._reconstruct, core.multiarray.scalar, slice,
        *{type(np.dtype(char)) for char in 'bBhHiIlLqQefd?'}
    ]


class _Inert:
    """Stands for any object that is not to be built."""

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return self

    def __setstate__(self, state):
        pass


class _TensorUnpickler(pickle.Unpickler):
    """Builds tensors and containers; anything else becomes inert.

    For torch before 2.6, whose ``weights_only`` refuses MMEngine's checkpoints
    and cannot be told what to accept.
    """

    def find_class(self, module: str, name: str):
        if (module == 'torch._utils' and name.startswith('_rebuild')
                or module == 'torch.storage' and name == 'UntypedStorage'
                or module == 'torch' and
                (name.endswith('Storage') or name in ('Size', 'device')
                 or isinstance(getattr(torch, name, None), torch.dtype))
                or (module, name) in (('collections', 'OrderedDict'),
                                      ('argparse', 'Namespace'))):
            return super().find_class(module, name)
        return _Inert


_tensor_pickle = types.ModuleType('tensor_pickle', 'see _TensorUnpickler')
_tensor_pickle.Unpickler = _TensorUnpickler
_tensor_pickle.load = lambda file, **kwargs: _TensorUnpickler(file, **kwargs
                                                              ).load()


def load_checkpoint(path: str,
                    keys: Sequence[str] = ('state_dict', )) -> dict:
    """Read a checkpoint onto the CPU, without running code that is in it.

    Args:
        path (str): A file with a state dict, alone or under one of ``keys``.
        keys (Sequence[str]): The first of these that is there has the state
            dict. Defaults to ('state_dict', ).

    Returns:
        dict: The checkpoint with, at least, 'state_dict'.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If the file is damaged, holds other objects than
            tensors and what MMEngine saves, or no state dict.
    """
    if not osp.isfile(path):
        raise FileNotFoundError(f'no checkpoint at {path!r}')
    # Mapped files are read only as far as they are used; torch maps zip files.
    mmap = zipfile.is_zipfile(path)
    with open(path, 'rb') as file:
        if file.read(2) == b'PK' and not mmap:
            raise CheckpointError(f'{path!r} is truncated: the end of the '
                                  'file is missing')
    try:
        if digit_version(torch.__version__) >= digit_version('2.6'):
            with torch.serialization.safe_globals(_safe_globals()):
                checkpoint = torch.load(
                    path, map_location='cpu', weights_only=True, mmap=mmap)
        else:
            checkpoint = torch.load(
                path,
                map_location='cpu',
                pickle_module=_tensor_pickle,
                mmap=mmap)
    except pickle.UnpicklingError as error:
        reason = re.search(r'Unsupported (global: GLOBAL \S+|operand \d+)', str(error))
        raise CheckpointError(
            f'{path!r} is damaged, or holds objects other than tensors that '
            'are not loaded from a file that may be hostile '
            f'({reason[0] if reason else "weights_only=True refuses it"})'
        ) from error
    except Exception as error:
        # torch raises whatever the damaged bytes happen to lead to.
        raise CheckpointError(f'{path!r} is not a readable checkpoint, perhaps'
                              f' damaged ({type(error).__name__})') from error
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f'{path!r} holds a {type(checkpoint).__name__}, '
                              'not a checkpoint')
    key = next((key for key in keys if key in checkpoint), None)
    if key != 'state_dict':
        checkpoint = dict(
            checkpoint if key else {},
            state_dict=checkpoint[key] if key else checkpoint)
    state_dict = checkpoint['state_dict']
    if not (isinstance(state_dict, dict) and state_dict and all(
            isinstance(v, torch.Tensor) for v in state_dict.values())):
        hint = ''
        if key is None and isinstance(state_dict.get('model'), dict):
            hint = (" ('model' may be one of another layout, see "
                    'tools/model_converters/repavit_to_mm.py)')
        raise CheckpointError(
            f'{path!r} holds no state dict: expected names with tensors, alone'
            f' or under {" or ".join(map(repr, keys))}{hint}')
    return checkpoint


def check_out(source: str, out: str) -> None:
    """Check that an output is neither the input nor a folder.

    Raises:
        ValueError, IsADirectoryError: If it is.
    """
    if osp.realpath(out) == osp.realpath(source):
        raise ValueError(f'the output {out!r} is the input: choose another '
                         'name')
    if osp.isdir(out):
        raise IsADirectoryError(f'the output {out!r} is a folder')


@contextmanager
def replacing(path: str) -> Iterator[str]:
    """Yield a temporary path beside ``path``, renamed to it on success.

    An interrupted write leaves neither a damaged nor a stray file.

    Raises:
        OSError: If the folder cannot be written to.
    """
    folder = osp.dirname(osp.abspath(path))
    try:
        os.makedirs(folder, exist_ok=True)
        handle, temporary = tempfile.mkstemp(
            dir=folder, prefix=f'.{osp.basename(path)}.',
            suffix=osp.splitext(path)[1])
    except OSError as error:
        raise OSError(f'cannot write {path!r}: {error.strerror or error}'
                      ) from error
    os.close(handle)
    try:
        yield temporary
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def save_checkpoint(checkpoint: dict, path: str) -> None:
    """``torch.save`` that never leaves a half-written file at ``path``."""
    with replacing(path) as temporary:
        torch.save(checkpoint, temporary)


def find_latest(work_dir: str) -> Optional[str]:
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
