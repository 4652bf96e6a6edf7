"""Modules that can be traced for images of any size: sizes in Python are constants of a trace."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmcv.cnn.bricks.transformer import AdaptivePadding

from repa_mm.faster.attention import MERGING, is_stock
from repa_mm.faster.windows import is_traced


class PatchPadding(AdaptivePadding):
    """mmcv's ``AdaptivePadding`` to whole patches, traceable for images of any size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_traced():
            return super().forward(x)
        h, w = (-size % stride for size, stride in zip(x.shape[2:], self.stride))
        top, left = (h // 2, w // 2) if self.padding == 'same' else (0, 0)
        return F.pad(x, (left, w - left, top, h - top))


def patch_padding(module: nn.Module, *_) -> type | None:
    """Return the class that mmcv's padding of patches that do not overlap becomes, or None."""
    is_of_patches = (
        is_stock(module, 'AdaptivePadding', MERGING)
        and module.kernel_size == module.stride
        and module.dilation == (1, 1)
    )
    return PatchPadding if is_of_patches else None


class TraceableCrossAttention(nn.MultiheadAttention):
    """PyTorch's attention, traceable for any number of keys where keys and values are one tensor.

    As in SegFormer and PVT, whose keys and values are from a smaller map. PyTorch projects both at
    once where they are the same object, and the number of keys becomes a constant of the trace.
    """

    def forward(self, query, key, value, **kwargs):
        if is_traced() and key is value:
            value = value.view_as(value)
        return super().forward(query, key, value, **kwargs)


class AveragePool(nn.AdaptiveAvgPool2d):
    """PyTorch's adaptive pooling as two matrix products, in graphs for images of any size."""

    @staticmethod
    def _matrix(size: int, new_size: int, like: torch.Tensor) -> torch.Tensor:
        """Return (n, size) weights: row i averages floor(i size / n) to ceil((i + 1) size / n)."""
        rows, cells = torch.arange(size), torch.arange(new_size)[:, None]
        size = torch.ones_like(cells) * rows.shape[0]
        start = cells * size // new_size
        stop = ((cells + 1) * size + new_size - 1) // new_size
        inside = ((rows >= start) & (rows < stop)).to(like)
        return inside / (stop - start).to(like)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pool x (B, C, H, W) to (B, C, height, width)."""
        size = self.output_size
        height, width = (size, size) if isinstance(size, int) else size
        down, across = self._matrix(x.shape[2], height, x), self._matrix(x.shape[3], width, x)
        return down @ (x @ across.t())


def average_pool(module: nn.Module, *_) -> type | None:
    """Return the class that PyTorch's adaptive pooling to more than a pixel becomes, or None."""
    is_one = type(module) is nn.AdaptiveAvgPool2d and module.output_size not in (1, (1, 1))
    return AveragePool if is_one else None
