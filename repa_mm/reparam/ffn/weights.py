"""Fold the weights of an FFN."""

from typing import NamedTuple

import torch


class FoldedFFN(NamedTuple):
    """Weights of z = x W^T + b + act(x W_in^T + b_in) W_out^T, an FFN without norms and shortcut.

    W (C, C) and b (C, ) contain the idle channels and all output biases. W_in (A, C), b_in (A, )
    and W_out (C, A) belong to the active channels.
    """

    w: torch.Tensor
    b: torch.Tensor
    w_in: torch.Tensor
    b_in: torch.Tensor
    w_out: torch.Tensor


def fold(
    w_in: torch.Tensor,
    b_in: torch.Tensor,
    w_out: torch.Tensor,
    b_out: torch.Tensor,
    num_active: int,
    affine1: tuple[torch.Tensor, torch.Tensor] | None = None,
    affine2: tuple[torch.Tensor, torch.Tensor] | None = None,
    layer_scale: torch.Tensor | None = None,
) -> FoldedFFN:
    """Fold norms and layer scale into an FFN, and its idle channels into one matrix (eq. 4-6).

    The operations are differentiable, and keep the dtype of the arguments.

    Args:
        w_in (torch.Tensor): First linear layer, (H, C), with the active channels first.
        b_in (torch.Tensor): Bias of the first layer, (H, ).
        w_out (torch.Tensor): Second linear layer, (C, H).
        b_out (torch.Tensor): Bias of the second layer, (C, ).
        num_active (int): Number of active channels A.
        affine1 (tuple, optional): s and t, each (C, ), of a norm s x + t before the first layer.
        affine2 (tuple, optional): s and t, each (H, ), of a norm before the second layer.
        layer_scale (torch.Tensor, optional): Scale g (C, ) of the output.

    Returns:
        FoldedFFN: The folded weights.
    """
    if affine1 is not None:
        s, t = affine1
        w_in, b_in = w_in * s, b_in + w_in @ t
    if affine2 is not None:
        s, t = affine2
        w_out, b_out = w_out * s, b_out + w_out @ t
    if layer_scale is not None:
        w_out, b_out = layer_scale[:, None] * w_out, layer_scale * b_out
    idle_in, idle_out = w_in[num_active:], w_out[:, num_active:]
    return FoldedFFN(
        w=idle_out @ idle_in,
        b=idle_out @ b_in[num_active:] + b_out,
        w_in=w_in[:num_active],
        b_in=b_in[:num_active],
        w_out=w_out[:, :num_active],
    )


def stack(folded: FoldedFFN, idle: bool = True) -> dict[str, torch.Tensor]:
    """Return the state dict of a :class:`MergedFFN` with these weights.

    Args:
        folded (FoldedFFN): The folded weights, with the shortcut in W.
        idle (bool): Whether there are idle channels. Without idle channels, W is only the shortcut,
            and is left out. Defaults to True.
    """
    w, b, w_in, b_in, w_out = folded
    if idle:
        state = {'fc1.weight': torch.cat([w_in, w]), 'fc1.bias': torch.cat([b_in, b])}
    else:
        state = {'fc1.weight': w_in, 'fc1.bias': b_in, 'fc2.bias': b}
    if len(w_in):
        state['fc2.weight'] = w_out
    return state
