"""Parameters and multiply-adds of a model."""

from typing import Any

import torch
import torch.nn as nn
from torch.utils.flop_counter import FlopCounterMode

_aten = torch.ops.aten
# Products with weights. Batched products are usually those of attention, which the paper's tables
# leave out.
_PRODUCTS = _aten.mm, _aten.addmm, _aten.convolution
_BATCHED = _aten.bmm, _aten.baddbmm


@torch.no_grad()
def count(model: nn.Module, inputs: Any) -> tuple[int, int]:
    """Count the parameters of a model, and the multiply-adds of its linear layers and convolutions.

    Products of attention, norms and activations are not counted, which comes closest to the tables
    of `RePaFormer <https://arxiv.org/abs/2505.21847>`_. Batched products are counted in modules
    with an attribute ``weight_operators``, which use them to multiply by their weights.

    Args:
        model (nn.Module): The model in eval mode, on any device ('meta' included).
        inputs (Tensor | tuple | dict): The model's inputs: one tensor, positional arguments or
            keyword arguments.

    Returns:
        tuple: Number of parameters (without buffers), and number of multiply-adds for the whole
        batch.
    """
    counter = FlopCounterMode(display=False)

    def flops(operators: tuple) -> int:
        found = counter.get_flop_counts().get('Global', {})
        return sum(found.get(operator, 0) for operator in operators)

    batched, handles = [], []
    for module in model.modules():
        if hasattr(module, 'weight_operators'):
            before = module.register_forward_pre_hook(lambda *_: batched.append(-flops(_BATCHED)))
            after = module.register_forward_hook(lambda *_: batched.append(flops(_BATCHED)))
            handles += [before, after]
        if 'DeformConv2d' in type(module).__name__:  # of mmcv, whose operator PyTorch cannot count
            after = module.register_forward_hook(
                lambda m, _, y: batched.append(2 * y.numel() * m.weight[0].numel())
            )
            handles.append(after)
    with counter:
        if isinstance(inputs, dict):
            model(**inputs)
        else:
            model(*(inputs if isinstance(inputs, tuple) else (inputs,)))
    for handle in handles:
        handle.remove()
    parameters = sum(p.numel() for p in model.parameters())
    return parameters, (flops(_PRODUCTS) + sum(batched)) // 2
