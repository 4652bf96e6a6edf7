"""The config of a converted model."""

import copy
from collections.abc import Sequence

import torch.nn as nn
from mmengine.config import Config, ConfigDict

from repa_mm.apis.models import has_structures
from repa_mm.convert.conversion_report import Sizes
from repa_mm.convert.training_form import NORM
from repa_mm.faster import Rewrite
from repa_mm.models.sites import attention_sites, ffn_sites


def converted_config(
    cfg: Config,
    model: nn.Module,
    sizes: Sizes | None = None,
    where: str | None = None,
    idle_ratio: float | None = None,
    rewritten: Sequence[tuple[str, Rewrite]] = (),
) -> Config:
    """Return the config of a model with parts of other sizes and with exact parts.

    If nothing changes, ``cfg`` itself is returned. ``model`` is the original model, ``where`` and
    ``idle_ratio`` are as for :class:`~repa_mm.convert.Conversion`, and ``rewritten`` is what
    :func:`~repa_mm.faster.rewrite_` has done to the model.
    """
    sizes = sizes or {}
    types = {name: rewrite.config for name, rewrite in rewritten if rewrite.config}
    if not sizes and not types:
        return cfg
    cfg = copy.deepcopy(cfg)
    _without_pretraining_(cfg.model)
    cfg.pop('work_dir', None)  # has checkpoints of the original model
    if head := types.pop('decode_head', None):
        # The model in a Restructured segmentor has the config of the head.
        owner = cfg.model if 'decode_head' in cfg.model else cfg.model.model
        owner.decode_head.type = head
    names = {*sizes, *types}
    if 'backbone' not in cfg.model or not all(name.startswith('backbone.') for name in names):
        cfg.model = with_structures(cfg.model, *_structures(model, sizes, where, idle_ratio))
    elif names:
        inside = {name.removeprefix('backbone.'): size for name, size in sizes.items()}
        structures = _structures(model.backbone, inside, None, idle_ratio)
        cfg.model.backbone = with_structures(cfg.model.backbone, *structures)
    if idle_ratio is not None:  # to test the deploy form
        cfg.merge_from_dict({'default_hooks.reparameterize': dict(type='ReparameterizeHook')})
    given = cfg.get('custom_imports') or {}
    imports = given.get('imports') or []
    imports = [imports] if isinstance(imports, str) else imports
    cfg.custom_imports = dict(given, imports=list(dict.fromkeys([*imports, 'repa_mm'])))
    return cfg


def _without_pretraining_(cfg: dict) -> None:
    """Let a model start without files of weights, in place: training starts from a checkpoint."""
    if str(cfg.get('type')).endswith('TIMMBackbone'):
        cfg['pretrained'] = False  # MMSegmentation's default is True
    elif 'pretrained' in cfg:
        cfg['pretrained'] = None
    inits = cfg.get('init_cfg') or []
    inits = inits if isinstance(inits, list) else [inits]
    if any(init.get('type') == 'Pretrained' for init in inits):
        del cfg['init_cfg']
    for value in cfg.values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, dict):
                _without_pretraining_(part)


def _structures(
    model: nn.Module, sizes: Sizes, where: str | None, idle_ratio: float | None
) -> list[dict]:
    """Return the configs of the structure that gives the parts of a model their sizes, if any."""
    if not sizes:
        return []
    widths = [sizes.get(site.block_name, (None,))[0] for site in ffn_sites(model, where)]
    structure = dict(type='Widths') if where is None else dict(type='Widths', where=where)
    if idle_ratio is not None:
        ratios = [idle_ratio if width is not None else None for width in widths]
        ratio = ratios if None in ratios else idle_ratio
        return [dict(structure, type='ChannelIdle', idle_ratio=ratio, norm_cfg=NORM)]
    heads = [sizes.get(site.name) for site in attention_sites(model, where or '')]
    given = dict(widths=widths, heads=heads)
    return [structure | {key: value for key, value in given.items() if any(value)}]


def with_structures(cfg: dict, *structures: dict) -> ConfigDict:
    """Return the config of a model with more structures; without any, it has faster attention."""
    if cfg['type'] == 'Restructured' or has_structures(cfg):
        return ConfigDict(cfg, structures=[*cfg.get('structures', []), *structures])
    return ConfigDict(type='Restructured', model=cfg, structures=[*structures])
