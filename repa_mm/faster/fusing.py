"""Fusing the BatchNorms of ConvModules, such as those in necks and heads, into convolutions."""

import torch
import torch.nn as nn
from mmcv.cnn import ConvModule
from torch.nn.utils.fusion import fuse_conv_bn_eval

from repa_mm.reparam import CheckpointError, check_finite, rounded
from repa_mm.surgery import copied, has_stock_forward


class Shift(nn.Module):
    """What is left of a BatchNorm whose scale is in the convolution: it adds (C, ) to maps."""

    def __init__(self, bias: nn.Parameter) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias[:, None, None]

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        # Loading that is not strict would take the convolution and the bias of both for fused ones.
        if f'{prefix}running_mean' in state_dict:
            raise CheckpointError(
                f'{prefix[:-1]!r} is fused into its convolution, and the checkpoint has a '
                'BatchNorm there: load it first, and fuse afterwards'
            )
        super()._load_from_state_dict(state_dict, prefix, *args)


class FusedConvModule(ConvModule):
    """A ``ConvModule`` whose convolution adds the :class:`Shift` that its norm is.

    The shift is not in the convolution, since heads such as TOOD's convolve by its weight, and call
    the norm themselves.
    """

    def forward(self, x: torch.Tensor, activate: bool = True) -> torch.Tensor:
        for layer in self.order:
            if layer == 'conv':
                x = self.padding_layer(x) if self.with_explicit_padding else x
                if self._is_ordinary():
                    x = self.conv._conv_forward(x, self.conv.weight, self.norm.bias)
                else:  # there are hooks, say
                    x = self.norm(self.conv(x))
            elif layer == 'act' and activate and self.with_activation:
                x = self.activate(x)
        return x

    @torch.compiler.assume_constant_result
    def _is_ordinary(self) -> bool:
        return has_stock_forward(self.conv, nn.Conv2d) and has_stock_forward(self.norm, Shift)


def _can_fuse(module: nn.Module, model: nn.Module) -> bool:
    if not (has_stock_forward(module, ConvModule) and module.with_norm):
        return False
    conv, norm, order = module.conv, module.norm, module.order
    return (
        has_stock_forward(conv, nn.Conv2d)
        and has_stock_forward(norm, nn.SyncBatchNorm, nn.BatchNorm2d)
        and order.index('norm') == order.index('conv') + 1
        and norm.running_mean is not None
        # Some heads share convolutions between levels, with a norm for each level.
        and sum(child is conv for m in model.modules() for child in m.children()) == 1
    )


@torch.inference_mode(False)
@torch.no_grad()
def fused_class_(module: nn.Module, _, model: nn.Module) -> type | None:
    """Fuse the norm of a ``ConvModule`` into its convolution, and return the class it becomes."""
    if not _can_fuse(module, model):
        return None
    check_finite(module)
    conv = module.conv
    fused = fuse_conv_bn_eval(*(copied(m).cpu().double().eval() for m in (conv, module.norm)))
    shift = Shift(rounded(fused.bias, conv.weight))
    conv.weight, conv.bias = rounded(fused.weight, conv.weight), None
    setattr(module, module.norm_name, shift)
    return FusedConvModule
