"""The ordinary modules that forms are filled from, merging in float64, and its checks."""

from typing import NamedTuple

import torch
import torch.nn as nn
from torch.nn.modules.batchnorm import _BatchNorm

from repa_mm.surgery import has_stock_forward


def double(tensor: torch.Tensor) -> torch.Tensor:
    """Cast a tensor to float64, on the CPU if the device has no float64 (MPS)."""
    if tensor.device.type == 'mps':
        tensor = tensor.cpu()
    return tensor.detach().double()


def any_of(mask: torch.Tensor) -> bool:
    """Return True if any element is true; always False on the meta device."""
    return not mask.is_meta and bool(mask.any())


def rounded(value: torch.Tensor, like: torch.Tensor) -> nn.Parameter:
    """Round a float64 tensor to a parameter of the dtype and device of ``like``, or raise."""
    # A copy, so that training cannot change the deploy form.
    result = value.to(like, copy=True)
    if any_of(~result.isfinite()):
        raise ValueError(
            f'the merged weights, up to {value.abs().max():.1e}, exceed the range of {like.dtype}: '
            'merge the model in another dtype'
        )
    return nn.Parameter(result)


def batch_norm_affine(norm: nn.Module, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return s and t, each (in, ), of the map s x + t that a BatchNorm computes in eval mode.

    Another module counts as an identity. ``like`` (out, in) is the next layer's weight, whose dtype
    and device s and t have; they are differentiable.
    """
    s = like.new_ones(like.shape[1])
    t = torch.zeros_like(s)
    if not hasattr(norm, 'running_mean'):
        return s, t
    if norm.running_mean is None:
        raise ValueError(
            'a BatchNorm without running statistics (track_running_stats=False) cannot be merged'
        )
    s = (norm.running_var.to(like) + norm.eps).rsqrt()
    if norm.affine:
        s, t = s * norm.weight.to(like), norm.bias.to(like)
    return s, t - s * norm.running_mean.to(like)


def check_dropouts(form: nn.Module) -> None:
    """Check that ``drop`` and ``dropout_layer``, which a merge leaves out, are dropouts."""
    for name in ('drop', 'dropout_layer'):
        module = getattr(form, name)
        # By name: mmcv and timm have a DropPath each.
        if type(module).__name__ not in ('Dropout', 'DropPath', 'Identity'):
            raise ValueError(
                f'its {name} is a {type(module).__name__}: the merge leaves out dropouts only'
            )


def is_batch_norm(norm: nn.Module) -> bool:
    """Return True if a module computes a BatchNorm in eval mode."""
    return has_stock_forward(norm, nn.SyncBatchNorm, _BatchNorm)


def check_finite(module: nn.Module) -> None:
    """Check that the parameters and BatchNorm statistics of a module can be merged."""
    merged = 'running_mean', 'running_var', 'layer_scale'
    buffers = (item for item in module.named_buffers() if item[0].endswith(merged))
    for name, tensor in (*module.named_parameters(), *buffers):
        if any_of(~tensor.isfinite()):
            raise ValueError(f'{name} has values that are not finite')


class FFNParts(NamedTuple):
    """A norm and the FFN after the norm: x + scale * fc2(act(fc1(norm(x)))).

    ``norm`` is ``nn.Identity()`` if no norm comes before the FFN. ``fc1`` (H, C) and ``fc2`` (C, H)
    are linear layers or 1 x 1 convolutions, ``scale`` (C, ) is the layer scale, a parameter or a
    constant, None if there is none. ``drop`` is the dropout of the hidden channels, ``last`` the
    dropout of the output, and ``drop_path`` the stochastic depth. ``conv``, if any, is a depthwise
    convolution between ``fc1`` and ``act``, on the map of the tokens.
    """

    norm: nn.Module
    fc1: nn.Module
    act: nn.Module
    fc2: nn.Module
    scale: torch.Tensor | None = None
    drop: nn.Module | None = None
    last: nn.Module | None = None
    drop_path: nn.Module | None = None
    conv: nn.Module | None = None

    @property
    def drop_rate(self) -> float:
        """The one rate of the dropouts of the hidden channels and of the output."""
        rates = [getattr(layer, 'p', 0.0) for layer in (self.drop, self.last)]
        if rates[0] != rates[1]:
            raise ValueError(
                f'its dropouts have different rates, {rates[0]} for the hidden channels and '
                f'{rates[1]} for the output: a form has one rate for both'
            )
        return rates[0]

    @property
    def drop_path_rate(self) -> float:
        """The rate of the stochastic depth."""
        return getattr(self.drop_path, 'drop_prob', None) or 0.0


class AttentionParts(NamedTuple):
    """A norm and the self-attention after the norm, with h heads.

    ``qkv`` (h (2 r + s), C) and ``proj`` (C, h s) are linear layers, ``scale`` (C, ) is the layer
    scale, None if there is none, ``table`` (L, h) the relative position biases of window attention,
    and ``factor`` multiplies the logits.
    """

    norm: nn.Module
    qkv: nn.Module
    proj: nn.Module
    scale: torch.Tensor | None = None
    table: torch.Tensor | None = None
    num_heads: int = 1
    factor: float = 1.0

    @property
    def dims(self) -> tuple[int, int]:
        """Dimensions r of queries and keys, and s of values, of a head."""
        values = self.proj.in_features
        keys = (self.qkv.out_features - values) // 2
        return keys // self.num_heads, values // self.num_heads


def weight_and_bias(
    layer: nn.Module, merged: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight (out, in) and bias (out, ) of a linear layer or 1 x 1 convolution, in float64.

    A missing bias is zero. If it is ``merged``, by this name in messages, the layer must compute
    what an ``nn.Linear`` does, and else a ``ValueError`` is raised.
    """
    if merged and not has_stock_forward(layer, nn.Linear):
        raise ValueError(
            f'{merged} is a {type(layer).__name__}, and not an nn.Linear: merge an adapter into '
            'its layer first, or remove what wraps the layer'
        )
    weight = double(layer.weight).flatten(1)
    return weight, weight.new_zeros(len(weight)) if layer.bias is None else double(layer.bias)


def fold_norm(norm: nn.Module, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight and bias of a layer with scale and shift of the norm before it, in float64."""
    weight, bias = weight_and_bias(layer)
    if getattr(norm, 'bias', None) is not None:
        bias = bias + weight @ double(norm.bias)
    if getattr(norm, 'weight', None) is not None:
        weight = weight * double(norm.weight)
    return weight, bias


@torch.no_grad()
def copy_affine_(into: nn.Module, norm: nn.Module) -> None:
    """Copy scale and shift of a norm into another norm, where both have them."""
    for name in ('weight', 'bias'):
        own, other = getattr(into, name, None), getattr(norm, name, None)
        if own is not None and other is not None:
            own.copy_(other)


@torch.no_grad()
def copy_matrix_(into: nn.Linear, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Copy a weight and a bias into a linear layer, or raise if it cannot have the bias."""
    into.weight.copy_(weight)
    if into.bias is not None:
        into.bias.copy_(bias)
    elif any_of(bias != 0):
        raise ValueError(
            'the norm of a pretrained layer shifts its output, and the linear layer after the '
            'norm has no bias for the shift'
        )
