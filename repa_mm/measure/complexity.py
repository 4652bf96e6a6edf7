"""Parameters and multiply-adds of a model."""

from contextlib import ExitStack
from typing import Any

import torch
import torch.nn as nn
from torch.utils.flop_counter import FlopCounterMode

_aten = torch.ops.aten
# Products with weights. Batched products are usually those of attention, which the paper's tables
# leave out.
_PRODUCTS = _aten.mm, _aten.addmm, _aten.convolution


@torch.no_grad()
def count(model: nn.Module, inputs: Any) -> tuple[int, int]:
    """Count the parameters of a model, and the multiply-adds of its linear layers and convolutions.

    The model is in eval mode, on any device ('meta' included). Its ``inputs`` are one tensor, or a
    tuple or a dict of arguments. The multiply-adds are those of the whole batch.

    Products of attention, norms and activations are not counted, which comes closest to the tables
    of `RePaFormer <https://arxiv.org/abs/2505.21847>`_. A convolution counts as such, whichever way
    it is computed: a ``FastUPerHead`` has the count of MMSegmentation's ``UPerHead``.
    """
    others = []
    with ExitStack() as stack:
        for module in model.modules():
            if hasattr(module, 'fpn_bottleneck'):  # with a hook, FastUPerHead runs it as it is
                hook = module.fpn_bottleneck.register_forward_hook(lambda *_: None)
                stack.enter_context(hook)
            if 'DeformConv2d' in type(module).__name__:  # of mmcv, which PyTorch cannot count
                hook = module.register_forward_hook(
                    lambda m, _, y: others.append(2 * y.numel() * m.weight[0].numel())
                )
                stack.enter_context(hook)
        counter = stack.enter_context(FlopCounterMode(display=False))
        if isinstance(inputs, dict):
            model(**inputs)
        else:
            model(*(inputs if isinstance(inputs, tuple) else (inputs,)))
    flops = counter.get_flop_counts().get('Global', {})
    macs = (sum(flops.get(product, 0) for product in _PRODUCTS) + sum(others)) // 2
    return sum(p.numel() for p in model.parameters()), macs
