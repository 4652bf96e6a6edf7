"""Translating checkpoints of the code of RePaFormer's authors, and of DINO's.

Their models have timm's names, ours OpenMMLab's. Besides the names differ

- the merged FFNs, fc1(x) + fc3(act(fc2(x))) there, of two products here (:class:`MergedFFN`);
- those of PoolFormers, which are convolutions of 1x1 there;
- those of LV-ViTs, which see the tokens divided by the residual scale there;
- what merges patches in Swin. There, the four neighbours of a patch are concatenated as (0, 0),
  (1, 0), (0, 1), (1, 1), each with all its channels. ``nn.Unfold``, with which MMCV merges patches,
  has (0, 0), (0, 1), (1, 0), (1, 1) of the first channel, then of the second, and so on.
"""

import math
import os.path as osp
import re
from argparse import Namespace

import torch
from mmengine.registry import MODELS

from repa_mm.checkpoints import load_checkpoint, load_weights, save_checkpoint
from repa_mm.reparam import CheckpointError
from repa_mm.reparam.ffn import FoldedFFN, stack
from repa_mm.version import __version__

_TRANSFORMER = {
    r'^patch_embed\.proj\b': 'patch_embed.projection',
    r'^norm_pre\b': 'pre_norm',
    r'^norm\b': 'ln1',
    r'^blocks\b': 'layers',
    r'^aux_head\b': 'head.aux_fc',
    r'^head(?=\.(weight|bias))': 'head.fc',
}
_VIT = {
    **_TRANSFORMER,
    # An ordinary ViT.
    r'(?<=\d)\.norm(?=[12]\.)': '.ln',
    r'(?<=\d)\.attn\.norm\b': '.ln1',
    r'\bmlp\b': 'ffn',
}
# Part of a name that only a family has, and its names there and here, to be replaced in turn.
_FAMILIES = dict(
    relative_position_bias_table={
        **_TRANSFORMER,
        r'^ln1': 'norm3',
        r'^layers\b': 'stages',
        r'\battn\b': 'attn.w_msa',
        r'\bmlp\b': 'ffn',
    },
    network={r'^norm\b': 'norm6', r'\bls$': 'layer_scale', r'^head\b': 'head.fc'},
    mlp_tokens={
        **_TRANSFORMER,
        r'^stem\.proj\b': 'patch_embed.projection',
        r'\bmlp_tokens\.norm\b': 'ln1',
        r'\bmlp_tokens\.fc1\b': 'token_mix.layers.0.0',
        r'\bmlp_tokens\.fc2\b': 'token_mix.layers.1',
        r'\bmlp_channels\b': 'channel_mix',
    },
    cls_token={
        **_VIT,
        **{rf'\bconv{i + 1}\b': f'stem.{3 * i}' for i in range(3)},
        **{rf'\bbn{i + 1}\b': f'stem.{3 * i + 1}' for i in range(3)},
    },
)


def translate(state_dict: dict, cfg: dict, args: Namespace | None = None) -> dict:
    """Translate weights of a classifier, or of a network that DINO trains, with its backbone.

    Args:
        state_dict (dict): The weights of a RePaFormer, in the training form or merged, or of an
            ordinary ViT or Swin.
        cfg (dict): Config of the backbone that the result is for: a RePaFormer for one, an ordinary
            backbone for the others. It tells the idle ratio, which the training form's weights do
            not.
        args (Namespace, optional): What the authors' code was called with, if it says how many
            channels are active: the config has to agree.

    Returns:
        dict: The weights of the backbone, whose names begin with 'backbone.', and of a classifier's
        layers, with 'head.'.

    Raises:
        CheckpointError: If the weights are not exactly those of this backbone, for example if they
            are a merged LV-ViT's: the authors' code gives it a norm that its training form lacks.
    """
    backbone = MODELS.build(cfg)
    own = backbone.state_dict()
    given = {k.rpartition('backbone.')[2]: v for k, v in state_dict.items() if 'backbone.' in k}
    given = {key.removeprefix('module.'): v for key, v in (given or state_dict).items()}
    family = next((mark for mark in _FAMILIES if any(mark in key for key in given)), None)
    if family is None:
        raise CheckpointError(
            f'weights of no known architecture: {", ".join(list(given)[:3])}, ...'
        )
    names = _FAMILIES[family]
    if any('.ffn.layers.' in key for key in own):
        names = {**names, r'\bffn\.fc1\b': 'ffn.layers.0.0', r'\bffn\.fc2\b': 'ffn.layers.1'}
    scale, weights = getattr(backbone, 'residual_scale', 1), {}
    for key, value in given.items():
        for theirs, ours in names.items():
            key = re.sub(theirs, ours, key)
        weights[key] = _value(key, value, scale)
    for name in [key.removesuffix('fc1.weight') for key in weights if key.endswith('fc1.weight')]:
        hidden, channels = weights[f'{name}fc1.weight'].shape
        if f'{name}norm1.weight' not in weights and hidden == channels:
            _stack(weights, name)
        elif hasattr(args, 'idle_ratio') and getattr(args, 'heuristic', 'static') == 'static':
            active = torch.tensor(_num_active(hidden, args.idle_ratio, family))
            weights[f'{name}num_active_channels'] = active
    head = {key: weights.pop(key) for key in list(weights) if key.startswith('head.')}
    # What is not learned depends on the size of the images there, and on the windows alone here.
    fixed = ('relative_position_index', 'attn_mask')
    weights = {key: value for key, value in weights.items() if not key.endswith(fixed)}
    weights |= {key: value for key, value in own.items() if key.endswith(fixed)}
    load_weights(backbone, weights)
    return {**{f'backbone.{key}': v for key, v in backbone.state_dict().items()}, **head}


def _value(key: str, value: torch.Tensor, scale: float) -> torch.Tensor:
    """What a weight with this name is here."""
    if 'downsample' in key:
        *rows, columns = value.shape
        value = value.view(*rows, 4, columns // 4)[..., [0, 2, 1, 3], :]
        return value.transpose(-2, -1).reshape(*rows, columns)
    if key.endswith('ffn.norm1.running_mean'):
        return value * scale
    if key.endswith('ffn.norm1.running_var'):
        return value * scale**2
    return value.flatten(1) if '.mlp.' in key and value.ndim == 4 else value


def _stack(weights: dict, name: str) -> None:
    """Give a merged FFN the two layers that it has here, in place."""
    names = 'fc1.weight', 'fc1.bias', 'fc2.weight', 'fc2.bias', 'fc3.weight'
    w, b, w_in, b_in, w_out = (weights.pop(name + layer, None) for layer in names)
    if w_in is None:
        w_in, b_in, w_out = w[:0], b[:0], w[:, :0]
    # Without idle channels, W is the shortcut alone.
    idle = not torch.equal(w, torch.eye(len(w)).to(w))
    merged = stack(FoldedFFN(w, b, w_in, b_in, w_out), idle)
    weights.update({name + layer: value for layer, value in merged.items()})


def _num_active(hidden: int, ratio: float, family: str) -> int:
    """How many channels are active in the authors' code, whose roundings differ."""
    if family == 'mlp_tokens':
        return hidden // 4
    return int(hidden * (1 - ratio)) if family == 'network' else math.ceil(hidden * (1 - ratio))


def translate_file(src: str, dst: str, cfg: dict, *keys: str) -> None:
    """Translate a file.

    Args:
        src (str): The authors' checkpoint.
        dst (str): The file to write, with a state dict as from :func:`translate`.
        cfg (dict): Config of the backbone.
        *keys (str): Where the weights may be in the file; the first that is there is taken.

    Raises:
        CheckpointError: If the file has no weights under these keys, or its weights do not fit.
    """
    found = load_checkpoint(src)
    found = {**found['state_dict'], **found}
    key = next((key for key in keys if key in found), None)
    if key is None:
        raise CheckpointError(f'{src} has no weights under {" or ".join(keys)}')
    state_dict = translate(found[key], cfg, found.get('args'))
    meta = dict(translated_from=osp.basename(src), repa_mm_version=__version__)
    save_checkpoint(dict(meta=meta, state_dict=state_dict), dst)
