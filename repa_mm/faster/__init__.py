"""Faster modules that compute the same as stock modules, with the same weights."""

import torch.nn as nn
from mmengine.registry import MODELS

from repa_mm.faster.attention import FastShiftWindowMSA
from repa_mm.faster.rewrite import (
    REWRITES,
    Rewrite,
    cuda_graphs_,
    fast_window_attention_,
    faster_on_gpu_,
    fuse_conv_bn_,
    rewrite_,
    trace_any_size_,
)
from repa_mm.faster.windows import Geometry, is_traced, symbolic_mul, traceable_partition

__all__ = [
    'REWRITES', 'FastShiftWindowMSA', 'Geometry', 'Rewrite', 'build_fast_uper_head', 'cuda_graphs_',
    'fast_window_attention_', 'faster_on_gpu_', 'fuse_conv_bn_', 'is_traced', 'rewrite_',
    'symbolic_mul', 'trace_any_size_', 'traceable_partition',
]  # fmt: skip


@MODELS.register_module(name='FastUPerHead')
def build_fast_uper_head(**kwargs) -> nn.Module:
    """Build a :class:`~repa_mm.faster.uper_head.FastUPerHead`, which needs MMSegmentation."""
    from repa_mm.faster.uper_head import FastUPerHead

    return FastUPerHead(**kwargs)
