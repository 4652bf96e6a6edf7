"""The config of a converted model."""

import copy

import torch.nn as nn
from mmengine.config import Config, ConfigDict

from repa_mm.apis.models import has_structures
from repa_mm.convert.conversion_report import Sizes
from repa_mm.convert.training_form import NORM
from repa_mm.faster import faster_parts_
from repa_mm.models.sites import attention_sites, ffn_sites
from repa_mm.surgery import copied

#: Modules of a segmentor that become faster by the type of its head.
_HEAD = {'decode_head', 'decode_head.fpn_bottleneck'}


def converted_config(
    cfg: Config,
    model: nn.Module,
    sizes: Sizes | None = None,
    where: str | None = None,
    idle_ratio: float | None = None,
) -> Config:
    """Return the config of a model with parts of other sizes and with faster parts.

    The latter are those of :func:`~repa_mm.faster.faster_parts_`. If nothing changes, ``cfg``
    itself is returned. ``model`` is the original model, ``where`` and ``idle_ratio`` are as for
    :class:`~repa_mm.convert.Conversion`.
    """
    sizes, faster = sizes or {}, _faster_modules(model)
    if not sizes and not faster:
        return cfg
    cfg = copy.deepcopy(cfg)
    _without_pretraining_(cfg.model)
    cfg.pop('work_dir', None)  # has checkpoints of the original model
    if 'decode_head' in faster:
        # The model in a Restructured segmentor has the config of the head.
        owner = cfg.model if 'decode_head' in cfg.model else cfg.model.model
        owner.decode_head.type = 'FastUPerHead'
    names = sizes.keys() | (faster - _HEAD)
    if 'backbone' not in cfg.model or not all(name.startswith('backbone.') for name in names):
        cfg.model = with_structures(cfg.model, *_structures(model, sizes, where, idle_ratio))
    elif names:
        inside = {name.removeprefix('backbone.'): size for name, size in sizes.items()}
        structures = _structures(model.backbone, inside, None, idle_ratio)
        cfg.model.backbone = with_structures(cfg.model.backbone, *structures)
    if idle_ratio is not None:  # to test the deploy form
        cfg.merge_from_dict({'default_hooks.reparameterize': dict(type='ReparameterizeHook')})
    return with_import(cfg)


def _faster_modules(model: nn.Module) -> set[str]:
    """Return the names of the modules that :func:`~repa_mm.faster.faster_parts_` replaces."""
    weights = {id(x): x for x in (*model.parameters(), *model.buffers())}
    faster = faster_parts_(copied(model, weights))  # shares the weights
    pairs = zip(model.named_modules(), faster.modules())
    return {name for (name, module), other in pairs if type(module) is not type(other)}


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


def with_import(cfg: Config) -> Config:
    """Let a config import this package, in place, and return the config."""
    given = cfg.get('custom_imports') or {}
    imports = given.get('imports') or []
    imports = [imports] if isinstance(imports, str) else list(imports)
    cfg.custom_imports = dict(given, imports=list(dict.fromkeys([*imports, 'repa_mm'])))
    return cfg
