"""Reading, loading and writing checkpoints."""

import torch
import torch.nn as nn
from mmengine.runner.checkpoint import CheckpointLoader

from repa_mm.io.files import replacing
from repa_mm.reparam import CheckpointError, match_form


def load_checkpoint(path: str) -> dict:
    """Read a checkpoint onto the CPU, as MMEngine does, from a file, a URL or another address.

    The state dict is under 'state_dict' then, without the prefix 'module.'.
    """
    checkpoint = CheckpointLoader.load_checkpoint(path, map_location='cpu')
    weights = checkpoint.get('state_dict', checkpoint)
    for key in [key for key in weights if key.startswith('module.')]:
        weights[key.removeprefix('module.')] = weights.pop(key)
    return {**checkpoint, 'state_dict': weights}


def save_checkpoint(checkpoint: dict, path: str) -> None:
    """Write a checkpoint with ``torch.save``: the file is complete or not written at all."""
    with replacing(path) as temporary:
        torch.save(checkpoint, temporary)


def split_init_cfg(module: nn.Module) -> tuple[list[dict], list[dict] | None]:
    """Return what names files of weights in a module's ``init_cfg``, and what else there is."""
    cfgs = getattr(module, 'init_cfg', None) or []
    cfgs = [cfgs] if isinstance(cfgs, dict) else cfgs
    files = [cfg for cfg in cfgs if cfg.get('type') == 'Pretrained']
    return files, [cfg for cfg in cfgs if cfg not in files] or None


# Counters, and the tables of Swin V2 that MMPretrain recomputes and does not load.
_COUNTERS = 'num_batches_tracked', 'num_active_channels'
_OPTIONAL = *_COUNTERS, 'relative_coords_table', 'relative_position_index'


def load_weights(
    model: nn.Module, state_dict: dict, path: str = 'the checkpoint', strict: bool = False
) -> None:
    """Load weights into a model, which is reparameterized if the weights are in the deploy form.

    Foreign weights outside the model's lists of layers are ignored if not ``strict``, such as those
    of a teacher, or of another version of the codebase. ``path`` names the weights in messages.

    Raises:
        CheckpointError: If weights are missing or have other shapes, or there are further layers,
            or further weights in a layer.
    """
    match_form(model, state_dict)
    try:
        found = model.load_state_dict(state_dict, strict=False)
    except RuntimeError as error:  # of other shapes
        raise CheckpointError(f'{path}: {error}') from error
    lists = nn.ModuleList, nn.Sequential
    layers = tuple(f'{name}.' for name, m in model.named_modules() if name and isinstance(m, lists))
    missing, foreign = ([key for key in keys if not key.endswith(_OPTIONAL)] for keys in found)
    kinds = dict(lacks=missing, has=[key for key in foreign if strict or key.startswith(layers)])
    differences = [f'{kind} {", ".join(keys[:3])} …' for kind, keys in kinds.items() if keys]
    if differences:
        raise CheckpointError(f'{path} is of another model: it {" and ".join(differences)}')
