"""The ordinary modules at a site of a model, from which forms are filled."""

from typing import NamedTuple

import torch
import torch.nn as nn

from .numerics import double


class FFNParts(NamedTuple):
    """A norm and the FFN after the norm: x + scale * fc2(act(fc1(norm(x)))).

    ``norm`` is ``nn.Identity()`` if no norm comes before the FFN.
    ``fc1`` (H, C) and ``fc2`` (C, H) are linear layers or 1 x 1 convolutions, ``scale`` (C, ) is
    the layer scale, a parameter or a constant, None if there is none; ``drop`` and ``drop_path``
    are the rates of dropout and of stochastic depth.
    """

    norm: nn.Module
    fc1: nn.Module
    act: nn.Module
    fc2: nn.Module
    scale: torch.Tensor | None = None
    drop: float = 0.0
    drop_path: float = 0.0


class AttentionParts(NamedTuple):
    """A norm and the attention after the norm.

    ``qkv`` (3 C, C) and ``proj`` (C, C) are linear layers, ``scale`` (C, ) is the layer scale, None
    if there is none, ``table`` (L, heads) the relative position biases of window attention.
    """

    norm: nn.Module
    qkv: nn.Module
    proj: nn.Module
    scale: torch.Tensor | None = None
    table: torch.Tensor | None = None


def matrix(layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weight (out, in) and bias of a linear layer or a 1 x 1 convolution, in float64."""
    return double(layer.weight).flatten(1), None if layer.bias is None else double(layer.bias)


def fold_norm(norm: nn.Module, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Fold scale and shift of a norm into the layer after the norm, in float64.

    Returns:
        tuple: Weight and bias of the layer.

    Raises:
        ValueError: If the norm has a shift and the layer has no bias.
    """
    weight, bias = matrix(layer)
    if getattr(norm, 'weight', None) is None:
        return weight, bias
    shift = weight @ double(norm.bias)
    if bias is None and shift.any():
        raise ValueError(
            'the norm of a pretrained layer shifts its output, and the linear layer behind the '
            'norm has no bias for the shift'
        )
    return weight * double(norm.weight), None if bias is None else bias + shift


@torch.no_grad()
def copy_affine_(into: nn.Module, norm: nn.Module | None = None) -> None:
    """Copy scale and shift of ``norm`` into another norm; without ``norm``, set 1 and 0."""
    for name, value in (('weight', 1.0), ('bias', 0.0)):
        own, other = getattr(into, name, None), getattr(norm, name, None)
        if own is not None and norm is None:
            own.fill_(value)
        elif own is not None and other is not None:
            own.copy_(other)


@torch.no_grad()
def copy_matrix_(into: nn.Linear, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Copy a weight and a bias into a linear layer; None means a bias of 0."""
    into.weight.copy_(weight)
    if into.bias is not None:
        into.bias.copy_(torch.zeros_like(into.bias) if bias is None else bias)
