"""Reading checkpoints."""

import copy
import os
import os.path as osp
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlparse

import mmengine.runner.checkpoint
import torch
from mmengine.runner.checkpoint import CheckpointLoader

from repa_mm.reparam import CheckpointError
from repa_mm.weights.unpickling import load_tensors

HOW_TO_GET_WEIGHTS = (
    'Convert released weights (huggingface.co/Ackesnal/RePaViT) with '
    'tools/model_converters/repavit_to_mm.py, or train the backbone on ImageNet-1k first '
    '(configs/repa_*_in1k.py), and put the file there or set model.backbone.init_cfg.checkpoint to '
    'its path. To train without pretrained weights: tools/train.py CONFIG --from-scratch'
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


def load_checkpoint(path: str, keys: Sequence[str] = ('state_dict',)) -> dict:
    """Read a checkpoint onto the CPU, without running code that is in it.

    Args:
        path (str): A file with a state dict, alone or under one of ``keys``; with the suffix
            .safetensors, one of that format. It must not change while its tensors are in use:
            their values are read when they are used.
        keys (Sequence[str]): The first of these that is there has the state dict. Defaults to
            ('state_dict', ).

    Returns:
        dict: The checkpoint with, at least, 'state_dict', whose names have no wrapper's prefix.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If the file is damaged, holds other objects than tensors and what MMEngine
            saves, more than its size allows, or no state dict.
    """
    if not osp.isfile(path):
        kind = 'folder' if osp.isdir(path) else 'device or pipe' if osp.exists(path) else ''
        raise FileNotFoundError(f'no checkpoint at {path!r}' + (kind and f': it is a {kind}'))
    checkpoint = _load(path)
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f'{path!r} holds a {type(checkpoint).__name__}, not a checkpoint')
    key = next((key for key in keys if key in checkpoint), None)
    state_dict = checkpoint[key] if key else checkpoint
    if not (
        isinstance(state_dict, dict)
        and state_dict
        and all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in state_dict.items())
    ):
        hint = (
            " ('model' may be one of another layout, see tools/model_converters/repavit_to_mm.py)"
        )
        other = key is None and isinstance(checkpoint.get('model'), dict)
        raise CheckpointError(
            f'{path!r} holds no state dict: expected names with tensors, alone or under '
            f'{" or ".join(map(repr, keys))}{hint * other}'
        )
    return dict(checkpoint if key else {}, state_dict=without_wrappers(state_dict))


def without_wrappers(state_dict: dict) -> dict:
    """Weights without what DistributedDataParallel and torch.compile put before their names."""
    names = {key: re.sub(r'^((module|_orig_mod)\.)+', '', key) for key in state_dict}
    if all(key == name for key, name in names.items()):
        return state_dict
    return {names[key]: value for key, value in state_dict.items()}


def _load(path: str) -> Any:
    """What is in a file of ``torch.save`` or, by its suffix, of Hugging Face's safetensors."""
    if not path.endswith('.safetensors'):
        return load_tensors(path)
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


def load_anywhere(path: str, map_location: Any = None) -> dict:
    """Read a checkpoint to keep, from a local file or from where else MMEngine can.

    Args:
        path (str): A path, or a URL or another address with a prefix that MMEngine knows.
        map_location: Ignored: the tensors are on the CPU.

    Returns:
        dict: As from :func:`load_checkpoint`.

    Raises:
        FileNotFoundError, CheckpointError: As :func:`load_checkpoint`, or if nobody knows the
            prefix.
    """
    if not is_remote(path):
        # A copy: the file may be replaced while a training uses its tensors.
        return copy.deepcopy(load_checkpoint(osp.expanduser(path)))
    load_safely()
    if CheckpointLoader._get_checkpoint_loader(path) is load_anywhere:
        raise FileNotFoundError(f'no checkpoint at {path!r}: it is no address that MMEngine knows')
    checkpoint = CheckpointLoader.load_checkpoint(path, map_location='cpu')
    state_dict = checkpoint.get('state_dict', checkpoint)
    return dict(checkpoint, state_dict=without_wrappers(state_dict))


def _load_url(url: str, model_dir: str | None = None, progress: bool = True, **kwargs) -> Any:
    """Download a file, unless it is there already, and read it without running code in it."""
    folder = model_dir or osp.join(torch.hub.get_dir(), 'checkpoints')
    path = osp.join(folder, osp.basename(urlparse(url).path))
    if not osp.isfile(path):
        os.makedirs(folder, exist_ok=True)
        torch.hub.download_url_to_file(url, path, progress=progress)
    return _load(path)


def load_safely() -> None:
    """Let MMEngine load local files with :func:`load_checkpoint`, and downloaded ones as safely.

    MMEngine would run the code in a pickle, at once or where loading without fails.
    """
    CheckpointLoader.register_scheme('', load_anywhere, force=True)
    # All of its loaders for URLs and names of models end here.
    mmengine.runner.checkpoint.load_url = _load_url


def find_latest(work_dir: str) -> tuple[str, dict | None] | None:
    """The checkpoint with which a training that was stopped goes on.

    This is the one that ``last_checkpoint`` names, or a later one that was written after that
    file: the training was killed in between. If that file is empty or of another place, it is the
    latest complete one of the folder.

    Args:
        work_dir (str): Where the training wrote its checkpoints.

    Returns:
        tuple | None: The path, and what :func:`load_checkpoint` reads there, or None if that is a
        URL; None if there is no checkpoint.

    Raises:
        CheckpointError: If there are some, and none is complete.
    """

    def step(path: str) -> int:
        match = re.fullmatch(r'(?:epoch|iter)_(\d+)\.pth', osp.basename(path))
        return int(match[1]) if match else -1

    names = os.listdir(work_dir) if osp.isdir(work_dir) else []
    found = [osp.join(work_dir, name) for name in names if step(name) >= 0]
    found.sort(key=step, reverse=True)
    pointer = osp.join(work_dir, 'last_checkpoint')
    if osp.isfile(pointer):
        with open(pointer, errors='replace') as file:
            path = file.read().strip()
        if is_remote(path):
            return path, None
        # A training that was moved is named where it was.
        named = [path, osp.join(work_dir, osp.basename(path))]
        later = [path for path in found if osp.getmtime(path) > osp.getmtime(pointer)]
        first = [path for path in named if osp.isfile(path)] + later
        found = sorted(first, key=step, reverse=True) + found
    error = None
    for path in found:
        try:
            return path, load_checkpoint(path)
        except CheckpointError as e:
            error = error or e
    if error:
        raise CheckpointError(f'nothing to resume from: {error}')
    return None
