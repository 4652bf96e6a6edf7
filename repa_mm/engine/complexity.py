"""Parameters and multiply-adds."""

import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from mmengine.analysis import FlopAnalyzer

# The paper counts the products of weights: not q k^T and attn v (matmul, bmm).
_WEIGHT_OPERATORS = ('linear', 'addmm', 'conv')


def count_parameters(model: nn.Module) -> int:
    """Number of parameters, without buffers."""
    return sum(p.numel() for p in model.parameters())


def count_macs(model: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Multiply-adds of linear and convolution layers for one image.

    The attention products and the norms are left out, as in the paper's
    tables.

    Args:
        model (nn.Module): A backbone or another model that takes a tensor.
        input_shape (tuple): Shape of one image, (channels, height, width).
    """
    return macs_by_part(model, input_shape)['']


class _Tensors(nn.Module):
    """A model of OpenMMLab as one that takes an image and gives tensors."""

    def __init__(self, model: nn.Module, data_samples: list) -> None:
        super().__init__()
        self.model, self.data_samples = model, data_samples

    def forward(self, x: torch.Tensor):
        return self.model(x, self.data_samples, mode='tensor')


def macs_by_part(
    model: nn.Module, input_shape: tuple[int, ...], data_samples: list | None = None
) -> dict[str, int]:
    """As :func:`count_macs`, for a model and each of its children.

    Args:
        model (nn.Module): A model that takes a tensor; with ``data_samples``
            a detector, segmentor or classifier.
        input_shape (tuple): Shape of one image, (channels, height, width).
        data_samples (list, optional): What a detector needs to know about
            that image, such as ``img_shape``.

    Returns:
        dict: Multiply-adds by the child's name; those of the whole model are
        under the empty name.
    """
    # Tracing wants inference mode, and leaves nothing behind on a copy.
    model = copy.deepcopy(model)
    # On a line of its own: the eval() of some backbones returns None.
    model.eval()
    param = next(model.parameters())
    x = torch.zeros(1, *input_shape, device=param.device, dtype=param.dtype)
    children = [name for name, _ in model.named_children()]
    traced: Any = model
    if data_samples is not None:
        traced = _Tensors(model, data_samples)
    with torch.no_grad():
        analyzer = FlopAnalyzer(traced, x)
        analyzer.unsupported_ops_warnings(False)
        analyzer.uncalled_modules_warnings(False)
        logger = logging.getLogger('mmengine.analysis')
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            operators = analyzer.by_module_and_operator()
        finally:
            logger.setLevel(level)
    prefix = '' if traced is model else 'model.'

    def count(name: str, kinds: Sequence[str]) -> int:
        found = operators[(prefix + name).rstrip('.')]
        return int(sum(found[kind] for kind in kinds))

    result = {name: count(name, _WEIGHT_OPERATORS) for name in ('', *children)}
    for name, module in model.named_modules():
        more = count(name, getattr(module, 'weight_operators', ()))
        for part in {'', name.partition('.')[0]} if more else ():
            result[part] += more
    return result
