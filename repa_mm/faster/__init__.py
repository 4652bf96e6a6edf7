"""Faster modules that compute the same as stock modules, with the same weights."""

import torch.nn as nn
from mmengine.registry import MODELS

from repa_mm.faster.attention import FastShiftWindowMSA, fast_window_attention, swap_attention
from repa_mm.faster.deformable import swap_deformable_attention
from repa_mm.faster.fusing import fuse_conv_bn
from repa_mm.faster.replace import replace
from repa_mm.faster.tracing import pad_any_size, swap_faster_attention, trace_any_size
from repa_mm.faster.windows import is_traced, traceable_partition

__all__ = [
    'FastShiftWindowMSA', 'build_fast_uper_head', 'fast_window_attention', 'fuse_conv_bn',
    'is_traced', 'pad_any_size', 'replace', 'swap_attention', 'swap_deformable_attention',
    'swap_faster_attention', 'trace_any_size', 'traceable_partition',
]  # fmt: skip


@MODELS.register_module(name='FastUPerHead')
def build_fast_uper_head(**kwargs) -> nn.Module:
    """Build a :class:`~repa_mm.faster.uper_head.FastUPerHead`, which needs MMSegmentation."""
    from repa_mm.faster.uper_head import FastUPerHead

    return FastUPerHead(**kwargs)
