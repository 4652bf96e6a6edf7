"""Faster parts, which compute what the stock ones compute, with the same weights."""

from importlib.util import find_spec

from repa_mm.faster.attention import FastShiftWindowMSA, fast_window_attention, swap_attention
from repa_mm.faster.deformable import FastDeformableAttention, swap_deformable_attention
from repa_mm.faster.fusing import fuse_conv_bn
from repa_mm.faster.replace import replace
from repa_mm.faster.tracing import pad_any_size, swap_faster_attention, trace_any_size

__all__ = [
    'FastDeformableAttention', 'FastShiftWindowMSA', 'fast_window_attention', 'fuse_conv_bn',
    'pad_any_size', 'replace', 'swap_attention', 'swap_deformable_attention',
    'swap_faster_attention', 'trace_any_size',
]  # fmt: skip

if find_spec('mmseg'):
    from repa_mm.faster.uper_head import FastUPerHead  # noqa: F401

    __all__ += ['FastUPerHead']
