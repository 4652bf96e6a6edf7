"""Models to choose from: what a config and a checkpoint say of each."""

import copy
import os.path as osp
from dataclasses import dataclass

import torch.nn as nn
from mmengine.config import Config

from repa_mm.benchmark.variants import STOCK
from repa_mm.convert.pretrained import save_model, with_import, with_structures
from repa_mm.faster import faster_parts_
from repa_mm.files import write_text
from repa_mm.opening import deploy_
from repa_mm.reparam import has_deploy_form


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


def original_candidates(
    model: nn.Module, checkpoint: str, folder: str
) -> tuple[Candidate, Candidate]:
    """Write configs of the original, and of the same with faster parts, which is to be narrowed.

    Args:
        model (nn.Module): The original, from ``open_model(…, merge=True)``.
        checkpoint (str): Its checkpoint. That of a merged model is written.
        folder (str): The folder to write to.

    Returns:
        tuple: Both; the same twice if there are no such parts.
    """
    name, stem, given = STOCK, osp.join(folder, 'stock'), checkpoint
    if has_deploy_form(model):  # nobody deploys the training form
        name, checkpoint = 'merged', f'{stem}.pth'
        model.cfg = copy.deepcopy(model.cfg)
        deploy_(model.cfg.model)
        save_model(model, given, checkpoint)
    write_text(f'{stem}.py', model.cfg.pretty_text)
    stock = Candidate(name, f'{stem}.py', checkpoint)
    faster = with_faster_parts(model.cfg, model)
    if faster is model.cfg:
        return stock, stock
    path = osp.join(folder, 'faster.py')
    write_text(path, faster.pretty_text)
    return stock, Candidate('faster parts', path, checkpoint)


def percent(budget: float) -> str:
    """Return the name of the candidate of a budget."""
    return f'{100 * budget:.0f} %'


def with_faster_parts(cfg: Config, stock: nn.Module) -> Config:
    """Return the config of a model with :func:`~repa_mm.faster.faster_parts_`.

    Args:
        cfg (Config): Config of the original model. Without such parts, the same is returned.
        stock (nn.Module): The original model.
    """
    pairs = zip(stock.named_modules(), faster_parts_(copy.deepcopy(stock)).modules())
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
