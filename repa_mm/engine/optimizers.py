"""Optimizers."""

from collections.abc import Iterable

import torch
from mmengine.registry import OPTIMIZERS


@OPTIMIZERS.register_module()
class RelativeAdamW(torch.optim.AdamW):
    """AdamW whose learning rate is a share of the root mean square of each parameter.

    The weights of a pretrained or fitted model differ in size by orders of magnitude, and one
    absolute step is too large for some of them. `Adafactor <https://arxiv.org/abs/1804.04235>`_
    scales its steps so, too.

    Args:
        params (Iterable): The parameters, or groups of them.
        **kwargs: Others of ``torch.optim.AdamW``; ``lr`` is relative.
        floor (float): The least root mean square that counts, so that zeros can change. Defaults
            to 1e-4.
    """

    def __init__(self, params: Iterable, floor: float = 1e-4, **kwargs) -> None:
        super().__init__(params, **kwargs)
        self.floor = floor

    @torch.no_grad()
    def step(self, closure=None):
        """Take a step, as ``torch.optim.AdamW.step``."""
        params = [p for g in self.param_groups for p in g['params'] if p.requires_grad]
        before = [p.clone() for p in params]
        loss = super().step(closure)
        for param, old in zip(params, before):
            size = old.square().mean().sqrt().clamp(min=self.floor)
            param.copy_(old + (param - old) * size)
        return loss
