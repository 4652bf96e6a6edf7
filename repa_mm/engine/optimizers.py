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
        """Take a step; a closure computes the loss anew."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [p for group in self.param_groups for p in group['params'] if p.grad is not None]
        before = [p.clone() for p in params]
        super().step()
        for param, old in zip(params, before):
            size = old.square().mean().sqrt().clamp(min=self.floor)
            param.copy_(old + (param - old) * size)
        return loss
