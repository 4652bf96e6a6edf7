"""What makes a model faster on a GPU, for inference only."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from repa_mm.faster.attention import FastShiftWindowMSA
from repa_mm.faster.windows import is_traced
from repa_mm.reparam.autograd import autocast_dtype
from repa_mm.surgery import has_stock_forward, replace_


class FastLayerNorm(nn.LayerNorm):
    """A ``LayerNorm`` that keeps the half precision of tokens under autocast.

    PyTorch's converts tokens to float32 before it, and again for the linear layer after it. With
    gradients and in graphs, both are the same.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_half = x.dtype == autocast_dtype(x.device.type)
        if not is_half or torch.is_grad_enabled() or is_traced():
            return super().forward(x)
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


def _norm_class(module: nn.Module) -> type | None:
    fits = has_stock_forward(module, nn.LayerNorm) and module.bias is not None
    return FastLayerNorm if fits else None


def _swap_norms_(model: nn.Module) -> None:
    for swin in model.modules():
        is_fast = any(isinstance(m, FastShiftWindowMSA) for m in swin.modules())
        if is_fast and hasattr(swin, 'patch_embed'):
            replace_(swin, _norm_class)


def _has_custom_operators(module: nn.Module) -> bool:
    """Return True if there are operators of mmcv, which read maps as contiguous ones."""
    return any(type(m).__module__.startswith('mmcv.ops') for m in module.modules())


def _channels_last_(model: nn.Module) -> None:
    for path, part in model.named_modules():
        name = path.rpartition('.')[2]
        readers = model if name == 'neck' else part  # all heads read a neck's maps
        if name in ('neck', 'bbox_head', 'rpn_head', 'mask_head', 'decode_head'):
            if not _has_custom_operators(readers):
                part.to(memory_format=torch.channels_last)


def faster_on_gpu_(model: nn.Module) -> nn.Module:
    """Prepare a detector, segmentor, classifier or backbone on a GPU for inference, in place.

    The convolutions of necks and heads get the memory format ``channels_last``, which matrix units
    need, except where operators of mmcv such as RoIAlign read the maps. The LayerNorms of Swins
    become :class:`FastLayerNorm`. Weights and the state dict stay the same. On another device,
    nothing changes.

    Args:
        model (nn.Module): The model, in eval mode; wrapped (DDP) or not.

    Returns:
        nn.Module: The same model.
    """
    device = next((p.device for p in model.parameters()), torch.device('cpu'))
    if device.type == 'cuda':
        _channels_last_(model)
        _swap_norms_(model)
    return model
