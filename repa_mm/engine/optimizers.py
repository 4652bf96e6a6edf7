"""Optimizers."""

from collections.abc import Iterable

import torch
from mmengine.registry import OPTIMIZERS


@OPTIMIZERS.register_module()
class RelativeAdamW(torch.optim.AdamW):
    """AdamW with a learning rate relative to the root mean square of each parameter.

    The weights of a pretrained or fitted model differ in size by orders of magnitude, and one
    absolute step is too large for some of them. `Adafactor <https://arxiv.org/abs/1804.04235>`_
    scales its steps in the same way.

    Args:
        params (Iterable): Parameters or parameter groups.
        floor (float): Lower bound of the root mean square, so that zeros can change. Defaults to
            1e-4.
        **kwargs: Other arguments of ``torch.optim.AdamW``; ``lr`` is relative.
    """

    def __init__(self, params: Iterable, floor: float = 1e-4, **kwargs) -> None:
        super().__init__(params, **kwargs)
        self.floor = floor

    @torch.no_grad()
    def step(self, closure=None):
        """Take a step, like ``torch.optim.AdamW.step``."""
        params = [p for g in self.param_groups for p in g['params'] if p.requires_grad]
        before = [p.clone() for p in params]
        loss = super().step(closure)
        for param, old in zip(params, before):
            size = old.square().mean().sqrt().clamp(min=self.floor)
            param.copy_(old + (param - old) * size)
        return loss
