"""Reading, loading and writing checkpoints."""

import copy
import re

import torch.nn as nn
from mmengine.runner.checkpoint import CheckpointLoader

from repa_mm.reparam import CheckpointError, match_form


def load_checkpoint(path: str) -> dict:
    """Read a checkpoint onto the CPU, as MMEngine does, from a file, a URL or another address.

    The state dict is under 'state_dict' then, without the prefix 'module.'.
    """
    checkpoint = CheckpointLoader.load_checkpoint(path, map_location='cpu')
    weights = checkpoint.get('state_dict', checkpoint.get('model', checkpoint))
    for key in [key for key in weights if key.startswith('module.')]:
        weights[key.removeprefix('module.')] = weights.pop(key)
    return {**checkpoint, 'state_dict': weights}


def split_init_cfg(module: nn.Module) -> tuple[list[dict], list[dict] | None]:
    """Return what names files of weights in a module's ``init_cfg``, and what else there is."""
    cfgs = getattr(module, 'init_cfg', None) or []
    cfgs = [cfgs] if isinstance(cfgs, dict) else cfgs
    files = [cfg for cfg in cfgs if cfg.get('type') == 'Pretrained']
    return files, [cfg for cfg in cfgs if cfg not in files] or None


#: Names of weights that are never required or checked: counters, computed tables and masks.
_FREE = (
    r'(num_batches_tracked|num_active_channels|relative_coords_table|relative_position_index'
    r'|attn_mask|position_ids|mask_token)$|\bdata_preprocessor\.'
)
#: In pretrained weights, heads too. They have the norm of the last output alone, or one for each.
_HEAD, _NORM = r'|(^|\.)\w*head\.', re.compile(r'(backbone\.)?(norm|ln)\d+\.')


def load_weights(
    model: nn.Module, state_dict: dict, path: str = 'the checkpoint', start: bool = False
) -> None:
    """Load weights into a model, which is reparameterized if the weights are in the deploy form.

    The weights must be all of the model's, and no others inside its modules; what lies beside its
    modules, such as a teacher, and heads that the model lacks are ignored. ``start`` is for
    pretrained weights: heads and norms of other outputs may be missing or left over, a class token
    left over, and a backbone ignores nothing else. ``path`` names the weights in messages.

    Raises:
        CheckpointError: If weights are missing, have other shapes, or are foreign.
    """
    match_form(model, state_dict)
    own, weights = model.state_dict(), copy.copy(state_dict)  # with its metadata
    free, modules = re.compile(_FREE + (_HEAD if start else '')).search, dict(model.named_modules())
    for key in own.keys() & weights.keys():
        if free(key) and own[key].shape != weights[key].shape:
            del weights[key]
    try:
        missing, foreign = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # of other shapes
        raise CheckpointError(f'{path}: {error}') from error
    if any('.lora_' in key for key in own):  # MMPretrain's LoRAModel hides what is missing
        missing = [key for key in own if key not in weights]
    if start:
        foreign = [k for k in foreign if not (_NORM.match(k) or k.endswith('cls_token'))]
        norms = tuple(norm[0] for norm in map(_NORM.match, weights) if norm)
        missing = [k for k in missing if not norms or k.startswith(norms) or not _NORM.match(k)]

    def beside(name: str) -> bool:
        while (owner := name.rpartition('.')[0]) not in modules:
            name = owner
        is_head = name.endswith('head')  # the first part that the model lacks
        is_part = owner or name in ('neck', 'backbone')
        return is_head or not is_part and (not start or 'backbone' in modules)

    kinds = dict(lacks=missing, has=[key for key in foreign if not beside(key)])
    kinds = {kind: [key for key in keys if not free(key)] for kind, keys in kinds.items()}
    differences = [f'{kind} {", ".join(keys[:3])} …' for kind, keys in kinds.items() if keys]
    if differences:
        raise CheckpointError(f'{path} is of another model: it {" and ".join(differences)}')
