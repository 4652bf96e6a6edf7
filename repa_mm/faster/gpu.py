"""What makes a model faster on a GPU, for inference only."""

import torch
import torch.nn as nn

from repa_mm.faster.attention import FastShiftWindowMSA, triton_kernels
from repa_mm.reparam.autograd import autocast_dtype, is_compiling
from repa_mm.surgery import become_, is_plain


class FastLayerNorm(nn.LayerNorm):
    """A ``LayerNorm`` whose output under autocast has the type of the linear layer after it.

    PyTorch's has float32 there, and converts twice. Elsewhere, and with gradients, both are the
    same.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = autocast_dtype(x.device.type)
        if not x.is_cuda or dtype is None or torch.is_grad_enabled() or is_compiling():
            return super().forward(x)
        return triton_kernels().layer_norm(x, self.weight, self.bias, self.eps, dtype)


def _is_norm_of_tokens(module: nn.Module) -> bool:
    return (
        is_plain(module, nn.LayerNorm)
        and len(module.normalized_shape) == 1
        and module.weight is not None
        and module.bias is not None
    )


def _has_custom_operators(module: nn.Module) -> bool:
    """Return True if there are operators of mmcv, which read maps as contiguous ones."""
    return any(type(m).__module__.startswith('mmcv.ops') for m in module.modules())


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
    if not next((p.is_cuda for p in model.parameters()), False):
        return model
    is_custom = _has_custom_operators(model)
    for owner in model.modules():
        for name in ('neck', 'bbox_head', 'rpn_head', 'mask_head', 'decode_head'):
            part = getattr(owner, name, None)
            if isinstance(part, nn.Module) and not _has_custom_operators(part):
                # A neck's maps go to all heads.
                if name != 'neck' or not is_custom:
                    part.to(memory_format=torch.channels_last)
        # Among the modules of a Swin itself.
        if triton_kernels() and hasattr(owner, 'patch_embed'):
            if any(isinstance(m, FastShiftWindowMSA) for m in owner.modules()):
                for module in owner.modules():
                    if _is_norm_of_tokens(module):
                        become_(module, FastLayerNorm)
    return model
