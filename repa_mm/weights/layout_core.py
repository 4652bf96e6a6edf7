"""Converting checkpoints between the layouts of RePaFormer's authors and of OpenMMLab.

A method of :class:`~repa_mm.weights.layout_family.Family` does what is special to a family.
"""

import argparse
import os.path as osp
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.registry import MODELS

from repa_mm.files import check_output
from repa_mm.paths import config_path
from repa_mm.reparam import CheckpointError, TrainingForm, outermost
from repa_mm.reparam.ffn import FoldedFFN, form_of, stack, unstack
from repa_mm.version import __version__
from repa_mm.weights import check_values, save_checkpoint
from repa_mm.weights.layout_family import Family, Weights, listed, match, rename_all
from repa_mm.weights.layout_idle_ratio import find_active_channels, shares
from repa_mm.weights.layout_lvvit import LVViT
from repa_mm.weights.layout_mixer import Mixer
from repa_mm.weights.layout_poolformer import PoolFormer
from repa_mm.weights.layout_swin import Swin
from repa_mm.weights.layout_vit import ViT
from repa_mm.weights.reading import load_checkpoint, without_wrappers

# In this order, since an LV-ViT has the marker of a ViT, too.
FAMILIES: tuple[Family, ...] = (Swin(), LVViT(), PoolFormer(), Mixer(), ViT())

_BUFFERS = re.compile(r'(relative_position_index|attn_mask|num_active_channels)$')
_CLASSIFIER = re.compile(r'head\.(layers\.head|layers\.head_dist|fc|aux_fc)\.')
# What a vanilla backbone has not.
_NEW = re.compile(r'(norm2\.(weight|bias|running_\w+)|norm1\.running_\w+|^pre_norm\.\w+)$')
_OUTPUT_NORM = re.compile(r'norm(\d+)\.')


class Conversion(NamedTuple):
    """A converted state dict, and what was found out about it.

    Attributes:
        state_dict: The weights, under their new names.
        backbone: Arguments of the backbone that the weights belong to.
        config: Name of the config that has this backbone, if there is one.
        form: 'training', 'deploy', or 'vanilla' for an initialization.
        idle_ratio: One number, or one for each FFN if they differ.
        idle_ratio_from: Where the idle ratio comes from.
        left_out: Names that the other layout has no place for.
        fresh: Names of new parameters and statistics.
    """

    state_dict: Weights
    backbone: dict
    config: str | None
    form: str
    idle_ratio: float | list[float]
    idle_ratio_from: str
    left_out: list[str]
    fresh: list[str]


def repavit_to_mm(
    src: str,
    dst: str,
    config: str | None = None,
    ema: bool = False,
    idle_ratio: Sequence[float] | None = None,
    backbone_only: bool = False,
) -> Conversion:
    """Convert the checkpoint ``src`` of the authors, or a vanilla one, to ``dst``.

    ``src`` holds a state dict, alone or under 'model', 'model_ema' or 'state_dict'; ``ema`` takes
    the averaged weights. ``dst`` is replaced only when it is complete. The other arguments are
    those of :func:`to_mm`.

    Raises:
        FileNotFoundError, CheckpointError, ValueError, OSError: If the checkpoint cannot be read or
            converted, or the file not written.
    """
    check_output(dst, src, config)
    averaged, keys = ('model_ema', 'state_dict_ema'), ('state_dict', 'model')
    checkpoint = load_checkpoint(src, (*averaged, *keys) if ema else keys)
    if ema and not any(key in checkpoint for key in averaged):
        raise CheckpointError(f'{src!r} has no averaged weights (model_ema)')
    args = checkpoint.get('args')
    args = vars(args) if isinstance(args, argparse.Namespace) else args
    args = args if isinstance(args, dict) else {}
    done = to_mm(checkpoint['state_dict'], config, idle_ratio, args, backbone_only)
    meta = dict(converted_from=osp.basename(src), backbone=done.backbone, form=done.form)
    meta['repa_mm_version'] = __version__
    save_checkpoint(dict(meta=meta, state_dict=done.state_dict), dst)
    return done


def mm_to_repavit(
    src: str, dst: str, config: str | None = None, img_size: int = 224, backbone_only: bool = False
) -> Conversion:
    """Convert the checkpoint ``src`` of a RePa backbone, for the authors' code, to ``dst``.

    ``dst`` gets the state dict under 'model', and is replaced only when it is complete. The other
    arguments are those of :func:`to_repavit`, the errors those of :func:`repavit_to_mm`.
    """
    check_output(dst, src, config)
    done = to_repavit(load_checkpoint(src)['state_dict'], config, img_size, backbone_only)
    save_checkpoint(dict(model=done.state_dict), dst)
    return done


def to_mm(
    state_dict: Weights,
    config: str | None = None,
    idle_ratio: Sequence[float] | None = None,
    args: dict | None = None,
    backbone_only: bool = False,
) -> Conversion:
    """Convert a state dict to a RePa backbone's, with a classifier's head.

    Args:
        state_dict (dict): Of the authors' code, in either form, or of a vanilla Swin, ViT, DeiT or
            LV-ViT in the layout of its own repository, of timm or of OpenMMLab.
        config (str, optional): Path of a config whose backbone the result is for. Defaults to None:
            the shapes tell the backbone.
        idle_ratio (Sequence[float], optional): One idle ratio, or one for each FFN, of a training
            form, whose shapes do not tell it. Defaults to None: that of ``args``, else what the
            BatchNorm statistics tell.
        args (dict, optional): What the authors' code was called with; its checkpoints have it.
        backbone_only (bool): Leave out the neck and the heads of a detector or segmentor, which is
            an error otherwise. Defaults to False.

    Returns:
        Conversion: With names that begin with 'backbone.' and 'head.'.

    Raises:
        CheckpointError: If a name is unknown, a weight is missing or of another shape, or a neck or
            a head would be lost.
    """
    given, family, left_out = _open(state_dict, backbone_only, ours=False)
    left_out += [key for key in given if any(match(key, name) for name in family.left_out)]
    weights, origin = family.rename({k: v for k, v in given.items() if not _BUFFERS.search(k)})
    form = _form_of(family, weights, origin)
    if form == 'vanilla' and not family.vanilla:
        raise CheckpointError(
            f'a vanilla {family.backbone[4:]} does not become a {family.backbone}: its other parts '
            'differ too (see docs/weights.md)'
        )
    found = family, weights, form, config
    model, merged, facts = _find_backbone(*found, _merged_to_ours, idle_ratio, args)
    _replace(weights, merged)
    family.to_ours(weights, model)
    head = {key: weights.pop(key) for key in list(weights) if key.startswith('head.')}
    fresh = _complete(model, weights, origin, form)
    out = {**{f'backbone.{key}': weights[key] for key in model.state_dict()}, **head}
    return Conversion(_copied(out), left_out=left_out, fresh=fresh, **facts)


def to_repavit(
    state_dict: Weights, config: str | None = None, img_size: int = 224, backbone_only: bool = False
) -> Conversion:
    """Convert a state dict of a RePa backbone to the authors' layout.

    Args:
        state_dict (dict): Of a classifier, detector or segmentor with a RePa backbone, or of the
            backbone alone, in either form. Only a classifier's head is converted.
        config (str, optional): Path of the model's config. Defaults to None: the shapes tell the
            backbone.
        img_size (int): Image size of the model that will load the weights, since the original Swin
            has masks of this size in its state dict. Defaults to 224.
        backbone_only (bool): As for :func:`to_mm`. Defaults to False.

    Returns:
        Conversion: With the names of the authors' repository.

    Raises:
        CheckpointError: As :func:`to_mm`, or if the authors' code has no counterpart.
    """
    weights, family, left_out = _open(state_dict, backbone_only, ours=True)
    ffn = next(part for part in family.ffns(weights).values() if form_of(part))
    form = form_of(ffn)
    if 'norm.weight' in ffn or form == 'training' and 'norm1.running_mean' not in ffn:
        raise CheckpointError(
            "FFNs with LayerNorm (ffn_norm_cfg 'LN') have no counterpart in the authors' code"
        )
    head = {key: weights.pop(key) for key in list(weights) if key.startswith('head.')}
    # The norms of detectors' and segmentors' other outputs.
    for key in list(weights):
        if _OUTPUT_NORM.match(key) and not match(key, family.names['norm']):
            left_out.append(key)
            del weights[key]
    model, merged, facts = _find_backbone(family, weights, form, config, _merged_to_authors)
    if family.only_ratio not in (None, facts['idle_ratio']):
        raise CheckpointError(
            f"the authors' code has this backbone with an idle ratio of {family.only_ratio} only, "
            f'and the checkpoint has {facts["idle_ratio"]}'
        )
    _complete(model, weights, {}, form)
    _replace(weights, merged)
    weights = {key: value for key, value in weights.items() if not _BUFFERS.search(key)}
    buffers = family.to_authors(weights, model, img_size)
    names = {new: old for old, new in family.names.items()}
    complaint = "the authors' code has no counterpart of these weights"
    out, _ = rename_all({**weights, **head}, names, complaint)
    return Conversion(_copied({**out, **buffers}), left_out=left_out, fresh=[], **facts)


def _open(
    state_dict: Weights, backbone_only: bool, ours: bool
) -> tuple[Weights, Family, list[str]]:
    """Take a backbone and a classifier's head out of a model; return names of the rest, too."""
    weights, others = without_wrappers(state_dict), []
    if any(key.startswith('backbone.') for key in weights):
        others = [k for k in weights if not (k.startswith('backbone.') or _CLASSIFIER.match(k))]
    weights = {k.removeprefix('backbone.'): v for k, v in weights.items() if k not in others}
    for family in FAMILIES:
        if any(re.search(family.marker, key) for key in weights):
            break
    else:
        raise CheckpointError(
            'the checkpoint is of no known architecture (known are '
            f'{", ".join(type(family).__name__ for family in FAMILIES)}): it has {listed(weights)}'
        )
    if any(map(form_of, family.ffns(weights).values())) != ours:
        raise CheckpointError(
            'the checkpoint has no channel-idle FFN: it is not of a RePa backbone of this project'
            if ours
            else 'the checkpoint is in the layout of RePa-MM already'
        )
    lost = [key for key in others if not key.startswith('data_preprocessor.')]
    if lost and not backbone_only:
        parts = ', '.join(sorted({key.partition('.')[0] for key in lost}))
        instead = 'tools/convert_pretrained.py converts a whole vanilla detector or segmentor'
        raise CheckpointError(
            f'the checkpoint is of a whole model, and its {len(lost)} weights of {parts} would be '
            f'lost: {"" if ours else f"{instead}; "}--backbone-only converts the backbone alone'
        )
    return weights, family, others


def _form_of(family: Family, weights: Weights, origin: dict[str, str]) -> str:
    """Find the form of the FFNs by the first: 'training', 'deploy' or 'vanilla'."""
    name, part = next(iter(family.ffns(weights).items()), (None, {}))
    if not part:
        raise CheckpointError(f'the checkpoint has no FFN: it has {listed(origin.values())}')
    if {'fc3.weight', 'norm1.weight'} <= part.keys():
        raise CheckpointError(
            f'{origin[f"{name}.fc3.weight"]!r} is of a merged FFN that has a norm, too: what its '
            'code computes is not what it was trained for (see docs/weights.md); convert the '
            'training form'
        )
    if 'norm1.weight' not in part:
        return 'deploy'
    return 'training' if 'norm1.running_mean' in part else 'vanilla'


def _find_backbone(
    family: Family,
    weights: Weights,
    form: str,
    config: str | None,
    convert: Callable[[Weights, int], tuple[Weights, int]],
    *ratio,
) -> tuple[nn.Module, dict[str, Weights], dict]:
    """Build the backbone that weights belong to.

    ``convert`` takes a merged FFN and its hidden width to the other layout, and returns it with its
    number of active channels; ``ratio`` is passed to :func:`find_active_channels`.

    Returns:
        tuple: The backbone, its converted merged FFNs, and facts for a :class:`Conversion`.
    """
    model, cfg, name = _build(family, weights, config)
    ffns, parts = dict(outermost(model, TrainingForm)), family.ffns(weights)
    hidden = [ffn.feedforward_channels for ffn in ffns.values()]
    merged = {}
    if form == 'deploy':
        active, source = [], 'the shapes'
        for key, width in zip(ffns, hidden):
            try:
                merged[key], number = convert(parts.get(key, {}), width)
                if number > width:
                    raise ValueError(f'{number} active channels, and {width} hidden ones')
            except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f'{key} is incomplete, damaged or of another architecture: {error}'
                ) from error
            active.append(number)
    else:
        active, source = find_active_channels(family, weights, ffns, config, *ratio)
    ratios = shares(active, hidden)
    cfg.update(idle_ratio=ratios, deploy=form == 'deploy')
    cfg.pop('idle_schedule', None)
    model = MODELS.build(dict(cfg))
    facts = dict(backbone=cfg, config=name, form=form, idle_ratio=ratios, idle_ratio_from=source)
    return model, merged, facts


def _build(family: Family, weights: Weights, config: str | None) -> tuple[nn.Module, dict, str]:
    """Build the training form of a backbone; return its arguments and its config's name, too."""
    settings = {} if config else family.settings(weights)
    arch = settings.pop('arch', None)
    kind = MODELS.get(family.backbone)
    zoo = getattr(kind, 'arch_zoo', None) or kind.arch_settings
    fitting = (key for key in family.configs if arch and arch.items() <= zoo[key].items())
    name = next(fitting, None)
    if not (config or name or family.complete):
        raise CheckpointError(
            f'the shapes are those of no {family.backbone} that has a config '
            f'({", ".join(family.configs)}), but of {arch}, and do not tell the rest: give a '
            '--config'
        )
    file = family.configs[name] if name else next(iter(family.configs.values()))
    cfg = _backbone_of(config or config_path(file))
    if cfg.get('type', '').rpartition('.')[2] != family.backbone:
        raise ValueError(
            f'the checkpoint is for a {family.backbone}, but the config {config!r} has a '
            f'{cfg.get("type")}'
        )
    if arch:
        cfg.update(arch=name or arch, **settings)
    outputs = {int(found[1]) for found in map(_OUTPUT_NORM.match, weights) if found}
    if outputs:
        cfg['out_indices'] = tuple(sorted(outputs))
    try:
        return MODELS.build(dict(cfg, deploy=False)), cfg, file if name else None
    except Exception as error:
        raise CheckpointError(
            f'no {family.backbone} can be built with what the shapes tell, '
            f'{arch or cfg.get("arch")}: {error}'
        ) from error


def _backbone_of(path: str) -> dict:
    """Read the arguments of a config's backbone."""
    if not osp.isfile(path):
        raise FileNotFoundError(f'no config at {path!r}')
    try:
        backbone = Config.fromfile(path).model.backbone.to_dict()
    except Exception as error:
        raise ValueError(
            f'the config {path!r} has no model.backbone that can be read: '
            f'{type(error).__name__}: {error}'
        ) from error
    return {k: v for k, v in backbone.items() if k not in ('init_cfg', 'frozen_stages')}


def _merged_to_ours(part: Weights, hidden: int) -> tuple[Weights, int]:
    """Convert a merged FFN of the authors, fc1(x) + fc3(act(fc2(x)))."""
    w, b = part['fc1.weight'], part['fc1.bias']
    w_in, b_in, w_out = w[:0], b[:0], w[:, :0]
    if 'fc2.weight' in part:
        w_in, b_in, w_out = part['fc2.weight'], part['fc2.bias'], part['fc3.weight']
    idle = len(w_in) < hidden
    if not idle and not torch.equal(w, torch.eye(*w.shape).to(w)):
        raise ValueError(
            'it has no idle channel, but a linear part other than the shortcut; its hidden width '
            f'is not {hidden}: give a --config'
        )
    return stack(FoldedFFN(w, b, w_in, b_in, w_out), idle), len(w_in)


def _merged_to_authors(part: Weights, hidden: int) -> tuple[Weights, int]:
    """Convert a merged FFN for the authors' code."""
    w, b, w_in, b_in, w_out = unstack(part)
    new = {'fc1.weight': w, 'fc1.bias': b}
    if len(w_in):
        new |= {'fc2.weight': w_in, 'fc2.bias': b_in, 'fc3.weight': w_out}
    return new, len(w_in)


def _replace(weights: Weights, ffns: dict[str, Weights]) -> None:
    """Replace the linear layers of FFNs, in place."""
    for name, part in ffns.items():
        for layer in ('fc1', 'fc2', 'fc3'):
            weights.pop(f'{name}.{layer}.weight', None)
            weights.pop(f'{name}.{layer}.bias', None)
        weights.update({f'{name}.{key}': value for key, value in part.items()})


def _complete(model: nn.Module, weights: Weights, origin: dict[str, str], form: str) -> list[str]:
    """Add what is new to weights, in place, and check that they are those of a model.

    ``origin`` has their names in the checkpoint where these are others. The names of what is new
    are returned.
    """
    fresh, own = [], model.state_dict()
    for key in [key for key in own if key not in weights]:
        if form == 'vanilla' and _NEW.search(key):
            fresh.append(key)
        elif not (_BUFFERS.search(key) or key.endswith('num_batches_tracked')):
            continue
        weights[key] = own[key]
    unexpected = [origin.get(key, key) for key in weights if key not in own]
    if unexpected:
        raise CheckpointError(f'{type(model).__name__} has no place for {listed(unexpected)}')
    missing = [key for key in own if key not in weights]
    if missing:
        raise CheckpointError(
            'the checkpoint is incomplete, or of another architecture: it has no counterpart of '
            + listed(missing)
        )
    for key, value in weights.items():
        if value.shape != own[key].shape:
            raise CheckpointError(
                f'{origin.get(key, key)!r} has shape {tuple(value.shape)}, expected is '
                f'{tuple(own[key].shape)}: it is damaged or of another architecture'
            )
    check_values(weights)
    return fresh


def _copied(weights: Weights) -> Weights:
    # A view would be saved with all that it is a view of.
    return {key: value.detach().clone() for key, value in weights.items()}
