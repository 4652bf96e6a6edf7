"""The BatchNorms of mmcv's ConvModules, folded into their convolutions."""

import collections
import warnings
from collections.abc import Iterator

import torch.nn as nn

from .numerics import batch_norm_affine, check_finite, double, is_plain, rounded


def foldable_conv_bns(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The ConvModules of a model, by name, whose BatchNorm can be folded.

    A ConvModule stays as it is if it has a hook, shares its convolution with another one, or has a
    convolution or norm of another kind.
    """
    try:
        from mmcv.cnn import ConvModule
    except ImportError:  # without mmcv there is no ConvModule either
        return
    modules = dict(model.named_modules())
    owners = collections.Counter(
        id(child) for module in modules.values() for child in module.children()
    )
    for name, module in modules.items():
        if not (
            isinstance(module, ConvModule)
            and type(module).forward is ConvModule.forward
            and 'forward' not in module.__dict__
            and module.with_norm
            and not hasattr(module.conv, 'parametrizations')
        ):
            continue
        conv, norm, order = module.conv, module.norm, module.order
        if (
            is_plain(conv, nn.Conv2d)
            and is_plain(norm, nn.SyncBatchNorm, nn.BatchNorm2d)
            and order.index('norm') == order.index('conv') + 1
            # Some heads share convolutions between levels and not their norms.
            and owners[id(conv)] == 1
            and norm.affine
            and norm.running_mean is not None
        ):
            yield name, module


def folded_conv(module: nn.Module) -> tuple[nn.Parameter, nn.Parameter]:
    """Weight and bias of a ConvModule's convolution with the BatchNorm folded into it.

    Raises:
        ValueError: If weights or statistics are not finite, not of 16 bits or more, or exceed the
            range of their dtype once they are folded.
    """
    check_finite(module)
    conv = module.conv
    weight = double(conv.weight)
    s, t = batch_norm_affine(module.norm, weight.new_empty(1, len(weight)))
    bias = t if conv.bias is None else s * double(conv.bias) + t
    return rounded(weight * s[:, None, None, None], conv.weight), rounded(bias, conv.weight)


def set_folded_conv(module: nn.Module, weight: nn.Parameter, bias: nn.Parameter) -> None:
    """Give a ConvModule what :func:`folded_conv` returns for it, and take its norm away."""
    module.conv.weight, module.conv.bias = weight, bias
    setattr(module, module.norm_name, nn.Identity())


def warn_of_folded_weights(*args) -> None:
    """Tell who asks for the state dict that it fits no model; a hook after ``state_dict()``."""
    warnings.warn(
        'this model has its BatchNorms folded into convolutions: its weights do not load into a '
        'model built from the config. For a checkpoint, use tools/reparameterize.py or '
        'reparameterize(model, fuse_conv_bn=False)'
    )
