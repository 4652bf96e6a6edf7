"""Parameters and multiply-adds."""
import copy
import logging
from typing import Tuple

import torch
import torch.nn as nn
from mmengine.analysis import FlopAnalyzer

# The paper counts the products of weights: not q k^T and attn v (matmul, bmm).
_WEIGHT_OPERATORS = ('linear', 'addmm', 'conv')


def count_parameters(model: nn.Module) -> int:
    """Number of parameters, without buffers."""
    return sum(p.numel() for p in model.parameters())


def count_macs(model: nn.Module, input_shape: Tuple[int, ...]) -> int:
    """Multiply-adds of linear and convolution layers for one image.

    The attention products and the norms are left out, as in the paper's
    tables.

    Args:
        model (nn.Module): A backbone or another model that takes a tensor.
        input_shape (tuple): Shape of one image, (channels, height, width).
    """
    # Tracing wants inference mode, and leaves nothing behind on a copy.
    model = copy.deepcopy(model).eval()
    param = next(model.parameters())
    x = torch.zeros(1, *input_shape, device=param.device, dtype=param.dtype)
    with torch.no_grad():
        analyzer = FlopAnalyzer(model, x)
        analyzer.unsupported_ops_warnings(False)
        analyzer.uncalled_modules_warnings(False)
        logger = logging.getLogger('mmengine.analysis')
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            operators = analyzer.by_operator()
        finally:
            logger.setLevel(level)
    return int(sum(operators[op] for op in _WEIGHT_OPERATORS))
