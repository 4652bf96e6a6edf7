"""Models to choose from: what a config and a checkpoint say of each."""

import copy
import os.path as osp
from dataclasses import dataclass

import torch.nn as nn

from repa_mm.apis.models import deploy_
from repa_mm.benchmark.variants import STOCK
from repa_mm.convert.changed_config import converted_config
from repa_mm.convert.pretrained import save_model
from repa_mm.io.files import write_text
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
    faster = converted_config(model.cfg, model)
    if faster is model.cfg:
        return stock, stock
    path = osp.join(folder, 'faster.py')
    write_text(path, faster.pretty_text)
    return stock, Candidate('faster parts', path, checkpoint)


def percent(budget: float) -> str:
    """Return the name of the candidate of a budget."""
    return f'{100 * budget:.0f} %'
