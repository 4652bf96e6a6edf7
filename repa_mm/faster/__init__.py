"""Faster modules that compute the same as stock modules, with the same weights."""

import torch.nn as nn
from mmengine.registry import MODELS

from repa_mm.faster.attention import FastShiftWindowMSA, fast_class, fast_window_attention_
from repa_mm.faster.cuda_graphs import cuda_graphs_
from repa_mm.faster.deformable import fast_deformable_class, swap_deformable_attention_
from repa_mm.faster.fusing import fuse_conv_bn_
from repa_mm.faster.gpu import faster_on_gpu_
from repa_mm.faster.tracing import pad_any_size_, swap_faster_attention_, trace_any_size_
from repa_mm.faster.windows import is_traced, symbolic_mul, traceable_partition
from repa_mm.surgery import replace_

__all__ = [
    'FastShiftWindowMSA', 'build_fast_uper_head', 'cuda_graphs_', 'fast_window_attention_',
    'faster_on_gpu_', 'faster_part', 'faster_parts_', 'fuse_conv_bn_', 'is_traced',
    'pad_any_size_', 'swap_deformable_attention_', 'swap_faster_attention_', 'symbolic_mul',
    'trace_any_size_', 'traceable_partition',
]  # fmt: skip


@MODELS.register_module(name='FastUPerHead')
def build_fast_uper_head(**kwargs) -> nn.Module:
    """Build a :class:`~repa_mm.faster.uper_head.FastUPerHead`, which needs MMSegmentation."""
    from repa_mm.faster.uper_head import FastUPerHead

    return FastUPerHead(**kwargs)


def faster_part(module: nn.Module) -> type | None:
    """Return our class for a stock window or deformable attention or UperNet's head, or None."""
    if type(module).__name__ == 'UPerHead':
        from repa_mm.faster.uper_head import fast_head_class

        return fast_head_class(module)
    return fast_class(module) or fast_deformable_class(module)


def faster_parts_(model: nn.Module) -> nn.Module:
    """Put our window and deformable attention and UperNet's faster head into a model, in place."""
    replace_(model, faster_part)
    return model
