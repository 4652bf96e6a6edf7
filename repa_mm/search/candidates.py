"""Models to choose from: what a config and a checkpoint say of each."""

import copy
from dataclasses import dataclass

import torch.nn as nn
from mmengine.config import Config

from repa_mm.convert.pretrained import with_import, with_structures
from repa_mm.faster import faster_parts_
from repa_mm.surgery import copied


@dataclass
class Candidate:
    """A model to choose from.

    Attributes:
        name (str): Its name in the table.
        config (str): Path of its config.
        checkpoint (str): Path of its checkpoint.
        budget (float): Fraction of the multiply-adds of its blocks that is left.
    """

    name: str
    config: str
    checkpoint: str
    budget: float = 1.0


def with_faster_parts(cfg: Config, stock: nn.Module) -> Config:
    """Return the config of a model with :func:`~repa_mm.faster.faster_parts_`.

    Args:
        cfg (Config): Config of the original model. Without such parts, the same is returned.
        stock (nn.Module): The original model.
    """
    pairs = zip(stock.named_modules(), faster_parts_(copied(stock)).modules())
    changed = {name for (name, module), other in pairs if type(module) is not type(other)}
    if not changed:
        return cfg
    cfg = copy.deepcopy(cfg)
    if 'decode_head' in changed:
        # The model in a Restructured segmentor has the config of the head.
        owner = cfg.model if 'decode_head' in cfg.model else cfg.model.model
        owner.decode_head.type = 'FastUPerHead'
    attention = changed - {'decode_head', 'decode_head.fpn_bottleneck'}
    if attention and all(name.startswith('backbone.') for name in attention):
        cfg.model.backbone = with_structures(cfg.model.backbone)
    elif attention:
        cfg.model = with_structures(cfg.model)
    return with_import(cfg)
