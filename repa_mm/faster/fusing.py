"""Fusing the BatchNorms of ConvModules, such as those in necks and heads, into convolutions."""

import collections

import torch
import torch.nn as nn
from mmcv.cnn import ConvModule

from repa_mm.reparam import batch_norm_affine, check_finite, double, rounded
from repa_mm.surgery import is_plain


def _can_fuse(module: nn.Module, owners: collections.Counter) -> bool:
    if not (
        isinstance(module, ConvModule)
        and type(module).forward is ConvModule.forward
        and 'forward' not in module.__dict__
        and module.with_norm
        and not hasattr(module.conv, 'parametrizations')
    ):
        return False
    conv, norm, order = module.conv, module.norm, module.order
    return (
        is_plain(conv, nn.Conv2d)
        and is_plain(norm, nn.SyncBatchNorm, nn.BatchNorm2d)
        and order.index('norm') == order.index('conv') + 1
        # Some heads share convolutions between levels, with a norm for each level.
        and owners[id(conv)] == 1
        and norm.affine
        and norm.running_mean is not None
    )


@torch.inference_mode(False)
@torch.no_grad()
def fuse_conv_bn_(model: nn.Module) -> nn.Module:
    """Fuse the BatchNorms of mmcv's ConvModules into their convolutions, in place.

    A ConvModule stays as it is if it has a hook, shares its convolution with another ConvModule, or
    has a convolution or norm of another kind. The weights of the result do not load into a model
    built from the config.

    Args:
        model (nn.Module): Any model.

    Returns:
        nn.Module: The same model, in eval mode.

    Raises:
        ValueError: If weights or statistics are not finite or have fewer than 16 bits, or the fused
            weights exceed the range of their dtype.
    """
    modules = list(model.modules())
    owners = collections.Counter(id(child) for module in modules for child in module.children())
    for module in modules:
        if not _can_fuse(module, owners):
            continue
        check_finite(module)
        conv = module.conv
        weight = double(conv.weight)
        s, t = batch_norm_affine(module.norm, weight.new_empty(1, len(weight)))
        bias = t if conv.bias is None else s * double(conv.bias) + t
        weight, bias = (
            rounded(weight * s[:, None, None, None], conv.weight),
            rounded(bias, conv.weight),
        )
        conv.weight, conv.bias = weight, bias
        setattr(module, module.norm_name, nn.Identity())
    model.eval()
    return model
