"""What forms are filled from: the ordinary modules at a site of a model."""

from typing import NamedTuple

import torch
import torch.nn as nn

from .numerics import double


class FFNParts(NamedTuple):
    """A norm and the FFN behind it: x + scale * fc2(act(fc1(norm(x)))).

    ``norm`` is ``nn.Identity()`` where no norm comes before the FFN.
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
    """A norm and the attention behind it.

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
    """Return weight and bias of a layer with scale and shift of the norm before it, in float64.

    Raises:
        ValueError: If the norm shifts its output, and the layer has no bias for the shift.
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
    """Give a norm scale and shift of another one, or without one a scale of 1 and a shift of 0."""
    for name, value in (('weight', 1.0), ('bias', 0.0)):
        own, other = getattr(into, name, None), getattr(norm, name, None)
        if own is not None and norm is None:
            own.fill_(value)
        elif own is not None and other is not None:
            own.copy_(other)


@torch.no_grad()
def copy_matrix_(into: nn.Linear, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Give a linear layer a weight and a bias; None is a bias of 0."""
    into.weight.copy_(weight)
    if into.bias is not None:
        into.bias.copy_(torch.zeros_like(into.bias) if bias is None else bias)
