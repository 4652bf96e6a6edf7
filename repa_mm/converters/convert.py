"""Checkpoints between the layouts of RePaFormer's authors and of OpenMMLab."""

import argparse
import math
import numbers
import os.path as osp
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from mmengine.config import Config
from mmengine.registry import MODELS

from repa_mm.checkpoints import load_checkpoint, save_checkpoint
from repa_mm.converters.families import (
    Family,
    Weights,
    count,
    family_of,
    get,
    listed,
    match,
    rename,
    swap_merged_patches,
    window_buffers,
)
from repa_mm.files import check_output
from repa_mm.models import linear_idle_ratios
from repa_mm.paths import config_path
from repa_mm.reparam import ChannelIdleFFN, CheckpointError, num_active_channels
from repa_mm.version import __version__

_BUFFERS = re.compile(r'(relative_position_index|attn_mask)$')
_PARTS = (
    'neck.',
    'head.',
    'bbox_head.',
    'rpn_head.',
    'roi_head.',
    'mask_head.',
    'decode_head.',
    'auxiliary_head.',
    'data_preprocessor.',
)
# Distance, in standard deviations, below which the mean of a hidden channel
# is that of a linear one.
_LINEAR = 0.1


class Conversion(NamedTuple):
    """A converted state dict, and what was found out about it.

    Attributes:
        state_dict: The weights, under their new names.
        backbone: Arguments of the backbone that they belong to.
        config: Name of the config that has this backbone, if there is one.
        form: 'training', 'deploy', or 'vanilla' for an initialization.
        idle_ratio: One number, or one for each FFN if they differ.
        idle_ratio_from: Where it comes from.
        left_out: Names that RePaFormers have no place for.
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
) -> Conversion:
    """Convert a checkpoint of the authors, or a vanilla one.

    Args:
        src (str): The checkpoint: a state dict, alone or under 'model',
            'model_ema' or 'state_dict'.
        dst (str): The file to write; it is replaced only when complete.
        config (str, optional): Path of a config whose backbone the result is for. Defaults to
            None: the shapes tell the backbone.
        ema (bool): Whether to take the averaged weights ('model_ema'). Defaults to False.
        idle_ratio (Sequence[float], optional): One idle ratio, or one for each FFN, of a
            training form. Defaults to None: see :func:`to_mm`.

    Raises:
        FileNotFoundError, CheckpointError, ValueError, OSError: If the
            checkpoint cannot be read or converted, or the file not written.
    """
    check_output(dst, src)
    averaged = ('model_ema', 'state_dict_ema')
    checkpoint = load_checkpoint(
        src, (*averaged, 'state_dict', 'model') if ema else ('state_dict', 'model')
    )
    if ema and not any(key in checkpoint for key in averaged):
        raise CheckpointError(f'{src!r} has no averaged weights (model_ema)')
    args = checkpoint.get('args')
    if isinstance(args, argparse.Namespace):
        args = vars(args)
    done = to_mm(
        checkpoint['state_dict'], config, idle_ratio, args if isinstance(args, dict) else {}
    )
    meta = dict(
        repa_mm_version=__version__,
        converted_from=osp.basename(src),
        backbone=done.backbone,
        form=done.form,
    )
    save_checkpoint(dict(meta=meta, state_dict=done.state_dict), dst)
    return done


def mm_to_repavit(src: str, dst: str, config: str | None = None, img_size: int = 224) -> Conversion:
    """Convert a checkpoint of a RePa backbone for the authors' code.

    Args:
        src (str): A checkpoint of a classifier, detector or segmentor.
        dst (str): The file to write, with the state dict under 'model'; it is
            replaced only when complete.
        config (str, optional): Path of the config that the checkpoint is of. Defaults to None:
            the shapes tell the backbone.
        img_size (int): Height and width of the images for the model that will load the result.
            Defaults to 224.

    Raises:
        FileNotFoundError, CheckpointError, ValueError, OSError: If the
            checkpoint cannot be read or converted, or the file not written.
    """
    check_output(dst, src)
    done = to_repavit(load_checkpoint(src)['state_dict'], config, img_size)
    save_checkpoint(dict(model=done.state_dict), dst)
    return done


def to_mm(
    state_dict: Weights,
    config: str | None = None,
    idle_ratio: Sequence[float] | None = None,
    args: dict | None = None,
) -> Conversion:
    """Convert a state dict to a RePa backbone's, with a classifier's head.

    Args:
        state_dict (dict): Of the authors' code, in either form, or of a
            vanilla Swin, ViT, DeiT or LV-ViT in the layout of its own
            repository, of timm or of OpenMMLab.
        config (str, optional): Path of a config whose backbone it is for.
            Defaults to None: recognized by the shapes.
        idle_ratio (Sequence[float], optional): Idle ratio, or one per FFN, of
            a training form, whose shapes do not tell it. Defaults to None:
            that of ``args``, else what the BatchNorm statistics tell.
        args (dict, optional): What the authors' code was called with; it
            stores that in its checkpoints.

    Returns:
        Conversion: With names that begin with 'backbone.' and 'head.'.

    Raises:
        CheckpointError: If a name is unknown, a weight is missing or of
            another shape.
    """
    given, left_out = _bare(state_dict)
    family = family_of(given)
    if _is_ours(family, given):
        raise CheckpointError('the checkpoint is in the layout of RePa-MM already')
    weights, origin, dropped = _rename(family, given)
    left_out += dropped
    form = _form_of(family, weights, origin)
    if form == 'vanilla' and not family.vanilla:
        raise CheckpointError(
            f'a vanilla {family.backbone[4:]} does not become a '
            f'{family.backbone}: its other parts differ too (see '
            'docs/weights.md)'
        )
    _transform(family, weights, given)

    model, cfg, name = _build(family, weights, form, config)
    ffns = {key: m for key, m in model.named_modules() if isinstance(m, ChannelIdleFFN)}
    if form == 'deploy':
        ratios, source = _ratios_of_shapes(weights, ffns), 'the shapes'
        _stack(weights, ffns)
    else:
        ratios, source = _ratios(family, weights, ffns, config, idle_ratio, args or {})
    if form == 'training':
        _scale_statistics(weights, ffns, getattr(model, 'residual_scale', 1.0))
    cfg.update(idle_ratio=ratios, deploy=form == 'deploy')
    cfg.pop('idle_schedule', None)
    if form == 'deploy':
        model = MODELS.build(dict(cfg))

    head = {key: weights.pop(key) for key in list(weights) if key.startswith('head.')}
    fresh = _complete(model, weights, origin, form)
    out = {f'backbone.{key}': weights[key] for key in model.state_dict()}
    out.update(head)
    # Copies, since a view would be saved with all that it is a view of.
    out = {key: value.detach().clone() for key, value in out.items()}
    return Conversion(out, cfg, name, form, ratios, source, left_out, fresh)


def to_repavit(state_dict: Weights, config: str | None = None, img_size: int = 224) -> Conversion:
    """Convert a state dict of a RePa backbone to the authors' layout.

    Args:
        state_dict (dict): Of a classifier, detector or segmentor with a RePa
            backbone, or of the backbone alone, in either form. Only a
            classifier's head is converted.
        config (str, optional): Path of the config it is of. Defaults to None:
            recognized by the shapes.
        img_size (int): Of the model that will load it; the original Swin has
            masks of this size in its state dict. Defaults to 224.

    Returns:
        Conversion: With the names of the authors' repository.

    Raises:
        CheckpointError: If a name is unknown, a weight is missing or of
            another shape, or there is no counterpart.
    """
    weights, left_out = _bare(state_dict)
    family = family_of(weights)
    if not _is_ours(family, weights):
        raise CheckpointError(
            'the checkpoint has no channel-idle FFN: it is not of a RePa backbone of this project'
        )
    form = 'training' if any(match(key, f'{family.ffn}.norm1') for key in weights) else 'deploy'
    if form == 'training' and not any(
        match(key, f'{family.ffn}.norm1.running_mean') for key in weights
    ):
        raise CheckpointError(
            "FFNs with LayerNorm (ffn_norm_cfg 'LN') have no counterpart in the authors' code"
        )
    head = {key: weights.pop(key) for key in list(weights) if key.startswith('head.')}
    # Those of detectors' and segmentors' other outputs.
    for key in list(weights):
        if re.match(r'norm\d+\.', key) and not match(key, family.names['norm']):
            left_out.append(key)
            del weights[key]
    model, cfg, name = _build(family, weights, form, config)
    ffns = {key: m for key, m in model.named_modules() if isinstance(m, ChannelIdleFFN)}
    if form == 'deploy':
        ratios = _ratios_of_shapes(weights, ffns, stacked=True)
        cfg.update(idle_ratio=ratios, deploy=True)
        model = MODELS.build(dict(cfg))
        source = 'the shapes'
    else:
        ratios, source = _ratios(family, weights, ffns, config)
        _scale_statistics(weights, ffns, 1 / getattr(model, 'residual_scale', 1.0))
    if family.backbone == 'RePaMlpMixer' and ratios != 0.75:
        raise CheckpointError(
            f"the Mixer of the authors' code has an idle ratio of 0.75 only, and this one {ratios}"
        )
    _complete(model, weights, {}, form)
    if form == 'deploy':
        _unstack(weights, ffns)
    weights.update(head)
    _restore(family, weights)
    names = {new: old for old, new in family.names.items()}
    out, unknown = {}, []
    for key, value in weights.items():
        old = rename(key, names)
        if old is None:
            unknown.append(key)
        else:
            out[old] = value.detach().clone()
    if unknown:
        raise CheckpointError(f"the authors' code has no counterpart of {listed(unknown)}")
    if family.backbone == 'RePaSwinTransformer':
        patch_size = weights['patch_embed.projection.weight'].shape[-1]
        window = model.stages[0].blocks[0].attn.window_size
        out.update(window_buffers(img_size, patch_size, model.depths, window))
    return Conversion(out, cfg, name, form, ratios, source, left_out, [])


def _is_ours(family: Family, weights: Weights) -> bool:
    """Whether there are channel-idle FFNs under our names."""
    # PoolFormer's have the same names elsewhere, but are convolutions.
    return any(
        match(key, f'{family.ffn}.fc1.weight') and value.ndim == 2 for key, value in weights.items()
    )


def _bare(state_dict: Weights):
    """The weights of a backbone and a classifier's head, without prefixes.

    Returns:
        tuple: The weights, and names of other parts of a model.
    """
    weights = dict(state_dict)
    for prefix in ('module.', '_orig_mod.', 'module.'):
        if all(key.startswith(prefix) for key in weights):
            weights = {k[len(prefix) :]: v for k, v in weights.items()}
    if not any(key.startswith('backbone.') for key in weights):
        return weights, []
    bare, others = {}, []
    for key, value in weights.items():
        if key.startswith('backbone.'):
            bare[key[len('backbone.') :]] = value
        elif re.match(r'head\.(layers\.head|layers\.head_dist|fc|aux_fc)\.', key):
            bare[key] = value
        elif key.startswith(_PARTS):
            others.append(key)
        else:
            bare[key] = value
    return bare, others


def _rename(family: Family, given: Weights):
    """Our names; where they come from; and what has no place."""
    names = {**family.others, **family.names}
    last = count(given, 'layers.#') - 1
    # timm has the downsampling at the start of a stage.
    shifted = any(match(key, f'layers.{last}.downsample') for key in given) and not any(
        match(key, 'layers.0.downsample') for key in given
    )
    weights, origin, dropped, unknown = {}, {}, [], []
    for key, value in given.items():
        if _BUFFERS.search(key):
            continue
        if any(match(key, name) for name in family.left_out):
            dropped.append(key)
            continue
        new = rename(key, names)
        if shifted and new:
            new = re.sub(
                r'^stages\.(\d+)\.downsample', lambda m: f'stages.{int(m[1]) - 1}.downsample', new
            )
        if new is None:
            unknown.append(key)
        elif new in weights:
            raise CheckpointError(f'{key!r} and {origin[new]!r} are the same weight in two layouts')
        else:
            weights[new], origin[new] = value, key
    if unknown:
        raise CheckpointError(
            f'the checkpoint looks like one of {family.backbone[4:]}, but '
            f'these names are unknown: {listed(unknown)}'
        )
    return weights, origin, dropped


def _form_of(family: Family, weights: Weights, origin: dict[str, str]) -> str:
    """The form that all FFNs have."""
    parts = {}
    for key in weights:
        found = match(key, family.ffn)
        if found:
            parts.setdefault(found[0], set()).add(key[found.end() + 1 :])
    if not parts:
        raise CheckpointError(f'the checkpoint has no FFN: it has {listed(origin.values())}')
    forms = {}
    for prefix, names in parts.items():
        if {'fc3.weight', 'norm1.weight'} <= names:
            raise CheckpointError(
                f'{origin[f"{prefix}.fc3.weight"]!r} is of a merged FFN that '
                'has a norm, too: what its code computes is not what it was '
                'trained for (see docs/weights.md); convert the training form'
            )
        if 'norm1.running_mean' in names:
            form = 'training'
        elif 'norm1.weight' in names:
            form = 'vanilla'
        else:
            form = 'deploy'
        forms.setdefault(form, prefix)
    if len(forms) > 1:
        a, b = (
            [origin[k] for k in weights if k.startswith(f'{prefix}.')][0]
            for prefix in list(forms.values())[:2]
        )
        raise CheckpointError(
            f'the FFNs are of different kinds ({", ".join(forms)}), see {a!r} '
            f'and {b!r}: the checkpoint is damaged'
        )
    return next(iter(forms))


def _transform(family: Family, weights: Weights, given: Weights) -> None:
    """Bring tensors into our shapes and orders, in place."""
    if family.backbone == 'RePaSwinTransformer' and not any(
        key.startswith('stages.') for key in given
    ):
        swap_merged_patches(weights, to_ours=True)
    if 'dist_token' in given:
        position = get(weights, 'pos_embed')
        weights['pos_embed'] = torch.cat([position[:, :1], position[:, 2:]], 1)
    for key, value in weights.items():
        if match(key, family.ffn) and value.ndim == 4:
            weights[key] = value.flatten(1)


def _restore(family: Family, weights: Weights) -> None:
    """The inverse of :func:`_transform`, without buffers, in place."""
    for key in list(weights):
        if _BUFFERS.search(key):
            del weights[key]
        elif (
            family.backbone == 'RePaPoolFormer'
            and match(key, family.ffn)
            and re.search(r'fc\d\.weight$', key)
        ):
            weights[key] = weights[key][:, :, None, None]
    if family.backbone == 'RePaSwinTransformer':
        swap_merged_patches(weights, to_ours=False)


def _build(family: Family, weights: Weights, form: str, config: str | None):
    """The backbone in its training form, its arguments, and its config."""
    settings = {} if config else family.settings(weights)
    arch = settings.pop('arch', None)
    kind = MODELS.get(family.backbone)
    zoo = getattr(kind, 'arch_zoo', None) or kind.arch_settings
    name = next(
        (
            name
            for name in family.configs
            if arch and all(zoo[name][key] == value for key, value in arch.items())
        ),
        None,
    )
    if not (config or name or family.complete):
        raise CheckpointError(
            f'the shapes are those of no {family.backbone} that has a config '
            f'({", ".join(family.configs)}), but of {arch}, and do not tell '
            'the rest: give a --config'
        )
    path = config or config_path(
        family.configs[name] if name else next(iter(family.configs.values()))
    )
    cfg = _backbone_of(path)
    if cfg.get('type', '').rpartition('.')[2] != family.backbone:
        raise ValueError(
            f'the checkpoint is for a {family.backbone}, but the '
            f'config {path!r} has a {cfg.get("type")}'
        )
    if not config:
        cfg.update(arch=name or arch, **settings)
    if family.backbone in ('RePaSwinTransformer', 'RePaPoolFormer'):
        outputs = {
            int(found[1]) for found in (re.match(r'norm(\d+)\.', key) for key in weights) if found
        }
        if not outputs:
            raise CheckpointError(
                'the checkpoint is incomplete: it has no norm behind the last stage'
            )
        cfg['out_indices'] = tuple(sorted(outputs))
    cfg['deploy'] = False
    try:
        model = MODELS.build(dict(cfg))
    except Exception as error:
        raise CheckpointError(
            f'no {family.backbone} can be built with what the shapes tell, '
            f'{arch or cfg.get("arch")}: {error}'
        ) from error
    found = (match(key, family.ffn) for key in weights)
    found = len({m.groups() for m in found if m})
    own = sum(isinstance(m, ChannelIdleFFN) for m in model.modules())
    if found != own:
        raise CheckpointError(
            f'the checkpoint has {found} FFNs, and the {family.backbone} '
            f'{cfg.get("arch")} has {own}: '
            + ('the config is of another architecture' if config else 'the checkpoint is damaged')
        )
    return model, cfg, None if config or not name else family.configs[name]


def _backbone_of(path: str) -> dict:
    if not osp.isfile(path):
        raise FileNotFoundError(f'no config at {path!r}')
    try:
        backbone = Config.fromfile(path).model.backbone.to_dict()
    except Exception as error:
        raise ValueError(
            f'the config {path!r} has no model.backbone that can '
            f'be read: {type(error).__name__}: {error}'
        ) from error
    for key in ('init_cfg', 'frozen_stages'):
        backbone.pop(key, None)
    return backbone


def _ratios(
    family: Family,
    weights: Weights,
    ffns: dict[str, ChannelIdleFFN],
    config: str | None,
    asked: Sequence[float] | None = None,
    args: dict | None = None,
):
    """Idle ratio of each FFN of a training form, and where it is from."""
    hidden = [ffn.feedforward_channels for ffn in ffns.values()]
    own = [ffn.num_active for ffn in ffns.values()]
    active, source = None, 'assumption'
    estimate = estimate_idle_ratio(weights, list(ffns))
    if asked:
        if len(asked) not in (1, len(ffns)):
            raise ValueError(
                f'{len(asked)} idle ratios were given: it takes '
                f'one, or one for each of {len(ffns)} FFNs'
            )
        asked = list(asked) * (len(ffns) // len(asked))
        active = list(map(num_active_channels, hidden, asked))
        source = 'request'
    elif args and _active_by(args, family, hidden):
        active = _active_by(args, family, hidden)
        source = "the checkpoint's arguments"
    elif estimate is not None:
        active = [num_active_channels(h, estimate) for h in hidden]
        source = 'the BatchNorm statistics'
    if config:
        if active is not None and active != own:
            raise ValueError(
                f'the idle ratio is {_shares(active, hidden)} by {source}, and'
                f' {_shares(own, hidden)} in the config: set '
                'model.backbone.idle_ratio'
            )
        active, source = own, 'the config' if active is None else source
    if active is None:
        active = [h // family.expansion for h in hidden]
        if family.backbone == 'RePaMlpMixer':
            source = "the authors' code"
    return _shares(active, hidden), source


def _active_by(args: dict, family: Family, hidden: list[int]) -> list[int] | None:
    """Numbers of active channels by the arguments of the authors' code."""
    ratio = args.get('idle_ratio')
    if (
        isinstance(ratio, bool)
        or not isinstance(ratio, numbers.Real)
        or not 0 <= ratio <= 1
        or not args.get('channel_idle')
    ):
        return None
    if family.backbone == 'RePaMlpMixer':  # takes no ratio
        return [h // family.expansion for h in hidden]
    ratios = [ratio] * len(hidden)
    if (
        family.backbone == 'RePaVisionTransformer'
        and str(args.get('heuristic')).strip().lower() == 'linear'
    ):
        ratios = linear_idle_ratios(ratio, len(hidden))
    # Rounded as there, where 1152 * (1 - 2 / 3) makes 385.
    whole = int if family.backbone == 'RePaPoolFormer' else math.ceil
    return [whole(h * (1 - r)) for h, r in zip(hidden, ratios)]


def estimate_idle_ratio(weights: Weights, ffns: Sequence[str]) -> float | None:
    """The idle ratio that the statistics of a trained model tell.

    An idle channel is linear in the output of the first BatchNorm, whose batch
    mean is its bias. So the mean that the second BatchNorm has seen of it
    follows from the weights; a nonlinearity shifts that of an active channel.

    Args:
        weights (dict): With FFNs in the training form.
        ffns (Sequence[str]): Their names.

    Returns:
        float: The ratio, if there is one that fits all FFNs; else None.
    """
    shares = []
    for name in ffns:
        part = {
            key: weights[f'{name}.{key}'].double()
            for key in (
                'fc1.weight',
                'fc1.bias',
                'norm1.bias',
                'norm2.running_mean',
                'norm2.running_var',
            )
            if f'{name}.{key}' in weights
        }
        if len(part) < 5:
            return None
        mean = part['fc1.weight'] @ part['norm1.bias'] + part['fc1.bias']
        distance = (part['norm2.running_mean'] - mean).abs() / (
            part['norm2.running_var'] + 1e-5
        ).sqrt()
        active = (distance > _LINEAR).nonzero().flatten().tolist()
        shares.append((active[-1] + 1 if active else 0) / len(mean))
    share = max(shares)
    # The last channels are all idle in every FFN, and nowhere far too many.
    if share > 0.95 or min(shares) < 0.9 * share:
        return None
    return 1 - share


def _ratios_of_shapes(
    weights: Weights, ffns: dict[str, ChannelIdleFFN], stacked: bool = False
) -> float | list[float]:
    """Idle ratio of each FFN of a deploy form."""
    numbers_active = []
    for name, ffn in ffns.items():
        rows, channels = get(weights, f'{name}.fc1.weight').shape[:2]
        if not stacked:
            active = (
                weights[f'{name}.fc2.weight'].shape[0] if f'{name}.fc2.weight' in weights else 0
            )
        elif f'{name}.fc2.bias' in weights:
            active = rows  # no idle channel
        else:
            active = rows - channels
        if not 0 <= active <= ffn.feedforward_channels:
            raise CheckpointError(
                f'{name} has {active} active channels, and the architecture '
                f'only {ffn.feedforward_channels} hidden ones: the checkpoint '
                'is damaged or of another architecture'
            )
        numbers_active.append(active)
    return _shares(numbers_active, [ffn.feedforward_channels for ffn in ffns.values()])


def _stack(weights: Weights, ffns: dict) -> None:
    """The merged FFNs of the authors' layout to ours, in place.

    Theirs is fc1(x) + fc3(act(fc2(x))).
    """
    for name, ffn in ffns.items():
        parts = ['fc1.weight', 'fc1.bias']
        if f'{name}.fc2.weight' in weights:
            parts += ['fc2.weight', 'fc2.bias', 'fc3.weight']
        old = {key: get(weights, f'{name}.{key}') for key in parts}
        for key in parts:
            del weights[f'{name}.{key}']
        w, b = old['fc1.weight'], old['fc1.bias']
        if len(old) == 2:
            new = {'fc1.weight': w, 'fc1.bias': b}
        elif len(old['fc2.weight']) < ffn.feedforward_channels:
            new = {
                'fc1.weight': torch.cat([old['fc2.weight'], w]),
                'fc1.bias': torch.cat([old['fc2.bias'], b]),
                'fc2.weight': old['fc3.weight'],
            }
        else:
            if not torch.equal(w, torch.eye(*w.shape).to(w)):
                raise CheckpointError(
                    f'{name} has no idle channel, but a linear part other '
                    'than the shortcut: its hidden width is not '
                    f'{ffn.feedforward_channels}; give a --config'
                )
            new = {
                'fc1.weight': old['fc2.weight'],
                'fc1.bias': old['fc2.bias'],
                'fc2.weight': old['fc3.weight'],
                'fc2.bias': b,
            }
        weights.update({f'{name}.{key}': v for key, v in new.items()})


def _unstack(weights: Weights, ffns: dict) -> None:
    """The inverse of :func:`_stack`."""
    for name in ffns:
        parts = ('fc1.weight', 'fc1.bias', 'fc2.weight', 'fc2.bias')
        w1, b1, w2, b2 = (weights.pop(f'{name}.{key}', None) for key in parts)
        channels = w1.shape[1]
        if w2 is None:
            new = (w1, b1)
        elif b2 is not None:
            new = (torch.eye(channels).to(w1), b2, w1, b1, w2)
        else:
            active = len(w1) - channels
            new = (w1[active:], b1[active:], w1[:active], b1[:active], w2)
        for key, value in zip((*parts, 'fc3.weight'), new):
            weights[f'{name}.{key}'] = value


def _scale_statistics(weights: Weights, ffns: dict, scale: float) -> None:
    """Statistics of the FFNs' inputs for inputs times a scale, in place.

    The authors' LV-ViT has its FFNs see the tokens divided by the residual
    scale.
    """
    for name in ffns:
        for key, power in (('running_mean', 1), ('running_var', 2)):
            key = f'{name}.norm1.{key}'
            if key in weights:
                weights[key] = weights[key] * scale**power


def _complete(model, weights: Weights, origin: dict[str, str], form: str) -> list[str]:
    """Check weights against a model, and add what is new.

    Returns:
        list: The names that were added.

    Raises:
        CheckpointError: If a weight is missing, has no place, or is of another
            shape.
    """
    own = model.state_dict()
    if (
        form == 'vanilla'
        and 'pos_embed' in weights
        and 'patch_embed.projection.bias' not in own
        and 'patch_embed.projection.bias' in weights
    ):
        position = weights['pos_embed'].clone()
        position[:, 1:] += weights.pop('patch_embed.projection.bias')
        weights['pos_embed'] = position
    fresh = []
    for key, value in own.items():
        if key in weights:
            continue
        if _BUFFERS.search(key) or key.endswith('num_batches_tracked'):
            weights[key] = value
        elif form == 'vanilla' and re.search(r'norm2\.|norm1\.running_|^pre_norm\.', key):
            weights[key] = value
            fresh.append(key)
    missing = [key for key in own if key not in weights]
    if missing:
        raise CheckpointError(
            'the checkpoint is incomplete, or of another architecture: it has '
            f'no counterpart of {listed(missing)}'
        )
    unexpected = [origin.get(key, key) for key in weights if key not in own]
    if unexpected:
        raise CheckpointError(f'{type(model).__name__} has no place for {listed(unexpected)}')
    for key, value in own.items():
        if weights[key].shape != value.shape:
            raise CheckpointError(
                f'{origin.get(key, key)!r} has shape '
                f'{tuple(weights[key].shape)}, expected is '
                f'{tuple(value.shape)}: it is damaged or of another '
                'architecture'
            )
    return fresh


def _shares(active: Sequence[int], hidden: Sequence[int]) -> float | list[float]:
    """Idle ratios; one number if they are all the same."""
    ratios = [round(1 - a / h, 12) for a, h in zip(active, hidden)]
    # 0.9 leaves 308 of 3072 channels active, and 1 - 308 / 3072 is not 0.9.
    plain, same = round(max(ratios), 2), len(set(ratios)) == 1
    if list(active) == [num_active_channels(h, plain) for h in hidden] and not (
        same and abs(plain - ratios[0]) > 1e-3
    ):
        return plain
    return ratios[0] if same else ratios
