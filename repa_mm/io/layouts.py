"""Translating checkpoints of timm, DINOv2, the official Swin, and RePaFormer's and DINO's authors.

Their models use timm's parameter names, ours OpenMMLab's. Other differences are:

- A merged FFN is fc1(x) + fc3(act(fc2(x))) in their code. :class:`~repa_mm.reparam.MergedFFN` has
  two linear layers.
- The FFNs of their PoolFormers are 1x1 convolutions.
- The FFNs of their LV-ViTs get the tokens divided by the residual scale.
- Their Swin concatenates the four neighbours of a patch as (0, 0), (1, 0), (0, 1), (1, 1), each
  with all its channels. ``nn.Unfold``, which MMCV's patch merging uses, returns (0, 0), (0, 1),
  (1, 0), (1, 1) of the first channel, then of the second channel, and so on.
- In timm's Swin the patch merging is part of the stage that follows it.
"""

import copy
import math
import os.path as osp
import re
from argparse import Namespace

import torch
import torch.nn as nn
from mmengine.config import ConfigDict
from mmengine.registry import MODELS
from mmpretrain.models.backbones.base_backbone import BaseBackbone
from mmpretrain.models.utils import resize_pos_embed

from repa_mm.io.checkpoints import load_checkpoint, load_weights
from repa_mm.io.files import replacing
from repa_mm.reparam import CheckpointError
from repa_mm.reparam.deploy_form import FoldedFFN, stack
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
    # A layer scale.
    r'\bls1\.gamma$': 'attn.gamma1.weight',
    r'\bls2\.gamma$': 'ffn.gamma2.weight',
    r'\bmlp\b': 'ffn',
}
# By a part of a parameter name that only this family has: regular expressions for the authors'
# names and our names, replaced one after the other.
_FAMILIES = dict(
    relative_position_bias_table={
        **_TRANSFORMER,
        r'^ln1': 'norm{}',
        r'^layers\b': 'stages',
        r'\battn\b': 'attn.w_msa',
        r'\bmlp\b': 'ffn',
    },
    network={r'^norm\b': 'norm{}', r'\bls$': 'layer_scale', r'^head\b': 'head.fc'},
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


def translate(
    state_dict: dict, cfg: dict, args: Namespace | dict | None = None, path: str = 'the checkpoint'
) -> dict:
    """Translate the weights of a RePaFormer in either form, or of an ordinary ViT or Swin.

    They are a classifier's, or those of a network trained with DINO. ``cfg`` is the backbone's
    config, with the idle ratio, which weights in the training form do not tell. The active channels
    of ``args``, the command-line arguments of the authors' code, must agree with it. The results
    have the prefixes 'backbone.' and 'head.'. Raises as :func:`load_weights`, such as for a
    merged LV-ViT, to which the authors' merge adds a norm.
    """
    backbone = MODELS.build(cfg)
    given = {key.removeprefix('module.'): value for key, value in state_dict.items()}
    weights, head = _translated(_inside(given, path), backbone, args)
    load_weights(backbone, weights, path, start=True)
    return {**{f'backbone.{key}': value for key, value in backbone.state_dict().items()}, **head}


class WeightsFile:
    """The weights that an ``init_cfg`` names, in MMPretrain's layout or in another one.

    They are for a backbone, or for a ``whole`` model. For a backbone, the prefix of its weights is
    found if ``init_cfg`` has none, and a prefix 'backbone.' that the file lacks is ignored.

    Raises:
        CheckpointError: If no weight has the prefix, or there are several backbones to choose from.
    """

    def __init__(self, init_cfg: dict, whole: bool = False) -> None:
        self.path = init_cfg['checkpoint']
        checkpoint = load_checkpoint(self.path)
        self._args, weights = checkpoint.get('args'), checkpoint['state_dict']
        self._given = _inside(weights, self.path, init_cfg.get('prefix'), whole)

    def weights_of(self, model: nn.Module) -> tuple[dict, bool]:
        """Return the weights under the names of a model, and whether they were translated."""
        own = model.state_dict().keys()
        foreign = {'patch_embed.proj.weight', 'stem.proj.weight'} & self._given.keys() - own
        # The first convolution of a PoolFormer has this name in MMPretrain, too.
        is_poolformer = any(key.startswith('network.') for key in own)
        if foreign or is_poolformer and 'norm.weight' in self._given.keys() - own:
            return _translated(self._given, model, self._args)[0], True
        return _in_sizes_of(model, self._given), False


def _inside(weights: dict, path: str, prefix: str | None = None, whole: bool = False) -> dict:
    """Return the weights behind a prefix, for a backbone or a whole model."""
    prefix = f'{prefix.rstrip(".")}.' if prefix else ''
    is_found = any(key.startswith(prefix) for key in weights)
    if not whole and not (prefix and is_found):
        owners = sorted({k[: k.rindex('backbone.') + 9] for k in weights if 'backbone.' in k})
        if len(owners) > 1:
            raise CheckpointError(
                f'{path} has weights of several backbones, {", ".join(owners)}: choose one of them '
                'by the prefix of init_cfg'
            )
        if not prefix or prefix.endswith('backbone.') and not owners:
            prefix, is_found = ''.join(owners), True
    if not is_found:
        raise CheckpointError(f'{path} has no weights behind the prefix {prefix!r} of init_cfg')
    if prefix:
        weights = {k[len(prefix) :]: v for k, v in weights.items() if k.startswith(prefix)}
    return weights


def _translated(
    given: dict, backbone: nn.Module, args: Namespace | dict | None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return weights under the names of a backbone, and those of a classifier's head."""
    own = backbone.state_dict()
    if registers := {'register_tokens', 'reg_token'} & given.keys() - own.keys():
        raise CheckpointError(
            f'the weights have registers ({registers.pop()}), and {type(backbone).__name__} has '
            'no place for them: take weights of the same model without registers'
        )
    args = args if isinstance(args, dict) else getattr(args, '__dict__', {})
    family = next((mark for mark in _FAMILIES if any(mark in key for key in given)), None)
    scale = getattr(backbone, 'residual_scale', 1)
    names = _names(given, own, _FAMILIES.get(family, {}))
    weights = {name: _value(name, given[key], scale, own) for key, name in names.items()}
    _to_our_ffns_(weights, family, args)
    head = {key: weights.pop(key) for key in list(weights) if key.startswith('head.')}
    return _in_sizes_of(backbone, weights), head


def _names(given: dict, own: dict, patterns: dict[str, str]) -> dict[str, str]:
    """Return our names by those of the given weights, see ``_FAMILIES``."""
    stages = re.findall(r'(?:layers|network)\.(\d+)', ' '.join(given))
    last = max(map(int, stages), default=0)
    if any('.ffn.layers.' in key for key in own):
        patterns = {**patterns, r'\bffn\.fc1\b': 'ffn.layers.0.0', r'\bffn\.fc2\b': 'ffn.layers.1'}
    # In timm a patch merging is part of the next stage: the first stage has none.
    is_timm = not any(key.startswith('layers.0.downsample.') for key in given)
    found = {}
    for key in given:
        name = key
        if '.downsample.' in key and is_timm:
            name = re.sub(r'\d+', lambda stage: str(int(stage[0]) - 1), key, count=1)
        for theirs, ours in patterns.items():
            name = re.sub(theirs, ours.format(last), name)
        found[key] = name
    return found


def _to_our_ffns_(weights: dict, family: str, args: dict) -> None:
    """Give merged FFNs two layers, and others their number of active channels, in place."""
    for name in [key.removesuffix('fc1.weight') for key in weights if key.endswith('fc1.weight')]:
        hidden, channels = weights[f'{name}fc1.weight'].shape[:2]
        if f'{name}norm1.weight' not in weights and hidden == channels:
            _stack(weights, name)
        elif 'idle_ratio' in args and args.get('heuristic', 'static') == 'static':
            active = torch.tensor(_num_active(hidden, args['idle_ratio'], family))
            weights[f'{name}num_active_channels'] = active


def _in_sizes_of(model: nn.Module, weights: dict) -> dict:
    """Return weights with the position embeddings and bias tables in the sizes of a model.

    Backbones of MMDetection and MMSegmentation do so in ``init_weights``, MMPretrain's while
    loading.
    """
    weights = copy.copy(weights)  # with its metadata
    own = {} if isinstance(model, BaseBackbone) else model.state_dict()
    for key in weights.keys() & own.keys():
        value = weights[key]
        if value.shape == own[key].shape:
            continue
        if re.match(r'stages\..*\.relative_position_bias_table$', key):
            sizes = [(math.isqrt(len(table)),) * 2 for table in (value, own[key])]
            weights[key] = resize_pos_embed(value[None], *sizes, num_extra_tokens=0)[0]
        elif key == 'pos_embed' and hasattr(model, 'interpolate_mode'):
            known = (math.isqrt(value.shape[1] - 1),) * 2
            size = tuple(side // model.patch_size for side in model.img_size)
            weights[key] = resize_pos_embed(value, known, size, model.interpolate_mode)
    return weights


def _value(key: str, value: torch.Tensor, scale: float, own: dict) -> torch.Tensor:
    """Convert a weight to the layout of our models, in which its name is ``key``."""
    if 'downsample' in key:
        *rows, columns = value.shape
        value = value.view(*rows, 4, columns // 4)[..., [0, 2, 1, 3], :]
        return value.transpose(-2, -1).reshape(*rows, columns)
    if key.endswith('ffn.norm1.running_mean'):
        return value * scale
    if key.endswith('ffn.norm1.running_var'):
        return value * scale**2
    is_conv = key in own and own[key].ndim == 4
    return value.flatten(1) if '.mlp.' in key and value.ndim == 4 and not is_conv else value


def _stack(weights: dict, name: str) -> None:
    """Replace the three layers of the authors' merged FFN by the two of ours, in place."""
    names = 'fc1.weight', 'fc1.bias', 'fc2.weight', 'fc2.bias', 'fc3.weight'
    w, b, w_in, b_in, w_out = (weights.pop(name + layer, None) for layer in names)
    if w_in is None:
        w_in, b_in, w_out = w[:0], b[:0], w[:, :0]
    # Without idle channels, the matrix is the shortcut alone.
    idle = not torch.equal(w, torch.eye(len(w)).to(w))
    merged = stack(FoldedFFN(w, b, w_in, b_in, w_out), idle)
    weights.update({name + layer: value for layer, value in merged.items()})


def _num_active(hidden: int, ratio: float, family: str) -> int:
    """Return the number of active channels in the authors' code, which rounds differently."""
    if family == 'mlp_tokens':
        return hidden // 4
    return int(hidden * (1 - ratio)) if family == 'network' else math.ceil(hidden * (1 - ratio))


def translate_file(src: str, dst: str, cfg: dict, *keys: str) -> None:
    """Translate the authors' checkpoint ``src`` for the backbone config ``cfg``, and write ``dst``.

    The weights are under the first of the ``keys`` that the checkpoint has. The file is opened
    again first, as an ``init_cfg``, and must give the backbone these weights.
    """
    found = load_checkpoint(src)
    key = next((key for key in keys if key in found), None)
    if key is None:
        raise CheckpointError(f'{src} has no weights under {" or ".join(keys)}')
    state_dict = translate(found[key], cfg, found.get('args'), src)
    meta = dict(translated_from=osp.basename(src), repa_mm_version=__version__)
    with replacing(dst) as temporary:
        torch.save(dict(meta=meta, state_dict=state_dict), temporary)
        init_cfg = ConfigDict(type='Pretrained', checkpoint=temporary, prefix='backbone.')
        written = MODELS.build(dict(cfg, init_cfg=init_cfg))
        written.init_weights()
        for key, value in written.state_dict().items():
            own = state_dict.get(f'backbone.{key}')
            if own is None or not torch.equal(value, own):
                raise CheckpointError(f'{dst} would not give the backbone its {key}')
