"""Preparing models for traced graphs that serve images of any size."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmcv.cnn.bricks.transformer import AdaptivePadding

from repa_mm.faster.attention import swap_attention_
from repa_mm.faster.deformable import swap_deformable_attention_
from repa_mm.faster.windows import is_traced
from repa_mm.reparam import replace_


class PatchPadding(AdaptivePadding):
    """mmcv's ``AdaptivePadding`` to whole patches, traceable for images of any size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_traced():
            return super().forward(x)
        h, w = (-size % stride for size, stride in zip(x.shape[2:], self.stride))
        top, left = (h // 2, w // 2) if self.padding == 'same' else (0, 0)
        return F.pad(x, (left, w - left, top, h - top))


def _padding_of_patches(module: nn.Module) -> type | None:
    # By class name, since MMDetection and MMSegmentation have copies of mmcv's class.
    is_of_patches = (
        type(module).__name__ == 'AdaptivePadding'
        and module.kernel_size == module.stride
        and module.dilation == (1, 1)
    )
    return PatchPadding if is_of_patches else None


def swap_faster_attention_(model: nn.Module) -> None:
    """Use our window attention and, on CPUs, our deformable attention, in place."""
    swap_attention_(model)
    swap_deformable_attention_(model)


def pad_any_size_(model: nn.Module) -> None:
    """Make the padding to whole patches traceable for images of any size, in place."""
    replace_(model, _padding_of_patches)


def trace_any_size_(model: nn.Module) -> None:
    """Make a model traceable for images of any size, in place.

    This replaces modules of MMPretrain, MMDetection and MMSegmentation that compute sizes in
    Python, which become constants of a trace: the attention and patch merging of Swin, the padding
    to whole patches, and deformable attention.
    """
    swap_faster_attention_(model)
    pad_any_size_(model)
