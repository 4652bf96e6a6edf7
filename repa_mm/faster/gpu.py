"""What makes a model faster on a GPU, for inference only."""

import torch
import torch.nn as nn

from repa_mm.faster.attention import FastShiftWindowMSA, has_kernels
from repa_mm.faster.windows import is_traced
from repa_mm.reparam.autograd import autocast_dtype
from repa_mm.surgery import has_stock_forward, replace_


class FastLayerNorm(nn.LayerNorm):
    """A ``LayerNorm`` whose output under autocast has the type of the linear layer after it.

    PyTorch's has float32 there, and converts twice. Elsewhere, with gradients and in graphs, both
    are the same.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = autocast_dtype(x.device.type)
        if dtype is None or torch.is_grad_enabled() or is_traced() or not has_kernels(x.device):
            return super().forward(x)
        from repa_mm.faster.kernels import layer_norm

        return layer_norm(x, self.weight, self.bias, self.eps, dtype)


def _norm_class(module: nn.Module) -> type | None:
    fits = (
        has_stock_forward(module, nn.LayerNorm)
        and len(module.normalized_shape) == 1
        and module.weight is not None
        and module.bias is not None
    )
    return FastLayerNorm if fits else None


def _swap_norms_(model: nn.Module) -> None:
    for swin in model.modules():
        if hasattr(swin, 'patch_embed'):
            if any(isinstance(m, FastShiftWindowMSA) for m in swin.modules()):
                replace_(swin, _norm_class)


def _has_custom_operators(module: nn.Module) -> bool:
    """Return True if there are operators of mmcv, which read maps as contiguous ones."""
    return any(type(m).__module__.startswith('mmcv.ops') for m in module.modules())


def _channels_last_(model: nn.Module) -> None:
    is_custom = _has_custom_operators(model)
    for owner in model.modules():
        for name in ('neck', 'bbox_head', 'rpn_head', 'mask_head', 'decode_head'):
            part = getattr(owner, name, None)
            if isinstance(part, nn.Module) and not _has_custom_operators(part):
                # A neck's maps go to all heads.
                if name != 'neck' or not is_custom:
                    part.to(memory_format=torch.channels_last)


def faster_on_gpu_(model: nn.Module) -> nn.Module:
    """Prepare a detector, segmentor, classifier or backbone on a GPU for inference, in place.

    The convolutions of necks and heads get the memory format ``channels_last``, which matrix units
    need, except where operators of mmcv such as RoIAlign read the maps. The LayerNorms of Swins
    become :class:`FastLayerNorm`. Weights and the state dict stay the same. On another device,
    nothing changes.

    Args:
        model (nn.Module): The model, in eval mode; wrapped (DDP) or not.
    """
    device = next((p.device for p in model.parameters()), torch.device('cpu'))
    if device.type == 'cuda':
        _channels_last_(model)
        if has_kernels(device):
            _swap_norms_(model)
    return model
