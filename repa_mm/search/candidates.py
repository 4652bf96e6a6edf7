"""Models to choose from: what a config and a checkpoint say of each."""

import copy
from dataclasses import dataclass

import torch.nn as nn
from mmengine.config import Config

from repa_mm.convert.pretrained import with_import, with_structures
from repa_mm.faster import swap_faster_attention_


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
    """Return the config of a model with our attention and UperNet's faster head.

    Args:
        cfg (Config): Config of the original model. Without such parts, the same is returned.
        stock (nn.Module): The original model.
    """
    ours = copy.deepcopy(stock)
    swap_faster_attention_(ours)
    pairs = zip(stock.named_modules(), ours.modules())
    changed = [name for (name, module), other in pairs if type(module) is not type(other)]
    model = copy.deepcopy(cfg.model)
    if changed and all(name.startswith('backbone.') for name in changed):
        model.backbone = with_structures(model.backbone)
    elif changed:
        model = with_structures(model)
    if type(getattr(stock, 'decode_head', None)).__name__ == 'UPerHead':
        from repa_mm.faster.uper_head import is_ordinary

        if is_ordinary(stock.decode_head):
            owner = model if 'decode_head' in model else model.model  # of a Restructured segmentor
            owner.decode_head.type = 'FastUPerHead'
    if model == cfg.model:
        return cfg
    cfg = copy.deepcopy(cfg)
    cfg.model = model
    return with_import(cfg)
