"""Preparing models for traced graphs that serve images of any size."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmcv.cnn.bricks.transformer import AdaptivePadding

from repa_mm.faster.attention import MERGING, fast_class, is_stock
from repa_mm.faster.deformable import swap_deformable_attention_
from repa_mm.faster.windows import is_traced
from repa_mm.surgery import replace_


class PatchPadding(AdaptivePadding):
    """mmcv's ``AdaptivePadding`` to whole patches, traceable for images of any size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_traced():
            return super().forward(x)
        h, w = (-size % stride for size, stride in zip(x.shape[2:], self.stride))
        top, left = (h // 2, w // 2) if self.padding == 'same' else (0, 0)
        return F.pad(x, (left, w - left, top, h - top))


class TraceableCrossAttention(nn.MultiheadAttention):
    """PyTorch's attention, traceable for any number of keys where keys and values are one tensor.

    As in SegFormer and PVT, whose keys and values are from a smaller map. PyTorch projects both at
    once where they are the same object, and the number of keys becomes a constant of the trace.
    """

    def forward(self, query, key, value, **kwargs):
        if is_traced() and key is value:
            value = value.view_as(value)
        return super().forward(query, key, value, **kwargs)


def _padding_of_patches(module: nn.Module) -> type | None:
    is_of_patches = (
        is_stock(module, 'AdaptivePadding', MERGING)
        and module.kernel_size == module.stride
        and module.dilation == (1, 1)
    )
    return PatchPadding if is_of_patches else None


def swap_faster_attention_(model: nn.Module) -> None:
    """Use our window attention and, on CPUs, our deformable attention, in place."""
    replace_(model, fast_class)
    swap_deformable_attention_(model)


def pad_any_size_(model: nn.Module) -> None:
    """Make the padding to whole patches traceable for images of any size, in place."""
    replace_(model, _padding_of_patches)


def trace_any_size_(model: nn.Module) -> None:
    """Make a model traceable for images of any size, in place.

    This replaces modules that compute sizes in Python, which become constants of a trace: the
    attention and patch merging of Swin, padding to whole patches, deformable attention, and the
    attention of SegFormer and PVT.
    """
    swap_faster_attention_(model)
    pad_any_size_(model)
    cross = TraceableCrossAttention
    replace_(model, lambda m: cross if type(m) is nn.MultiheadAttention else None)
