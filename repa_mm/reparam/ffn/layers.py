"""The layers of FFNs, and the symbols for their shapes.

x (N, C) are the tokens, H is the hidden width, A the number of active channels, and theta = 1 - A/H
the idle ratio.
"""

import math

import torch
import torch.nn as nn


class TokenGroupNorm(nn.GroupNorm):
    """GroupNorm over all tokens of a sample, x of shape (B, ..., C)."""

    def __init__(self, num_channels: int, num_groups: int = 1, **kwargs) -> None:
        super().__init__(num_groups, num_channels, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.movedim(-1, 1)).movedim(1, -1)


# These norms depend on the sample, and stay before the deploy form.
KEPT_NORMS = nn.LayerNorm, TokenGroupNorm

_NORMS = {
    'BN': nn.BatchNorm1d,
    'BN1d': nn.BatchNorm1d,
    'SyncBN': nn.SyncBatchNorm,
    'LN': nn.LayerNorm,
    'TokenGN': TokenGroupNorm,
}


def num_active_channels(feedforward_channels: int, idle_ratio: float) -> int:
    """Return the number of hidden channels that pass the activation, ceil(H (1 - theta)).

    Args:
        feedforward_channels (int): Hidden width H.
        idle_ratio (float): Idle ratio theta in [0, 1].

    Raises:
        ValueError: If the idle ratio is not a number in [0, 1].
    """
    if not 0 <= idle_ratio <= 1:
        raise ValueError(
            'idle_ratio must be a number from 0 (every channel is activated) to 1 (none is), but '
            f'got {idle_ratio!r}'
        )
    # 1152 * (1 - 2/3) is 384.00000000000006 in floating point, not 385.
    return math.ceil(round(feedforward_channels * (1 - idle_ratio), 6))


def build_activation(act_cfg: dict | nn.Module) -> nn.Module:
    """Build an activation that is never in place.

    Args:
        act_cfg (dict | nn.Module): ``type``, the name of an activation in ``torch.nn`` or a module
            class, and its arguments; or a module, which is returned.

    Raises:
        ValueError: If ``type`` is neither a name in ``torch.nn`` nor a module class.
    """
    if isinstance(act_cfg, nn.Module):
        return _not_inplace(act_cfg)
    kwargs = dict(act_cfg)
    name = kwargs.pop('type')
    layer = getattr(nn, name, None) if isinstance(name, str) else name
    if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise ValueError(
            f'act_cfg type {name!r} is neither the name of an '
            'activation in torch.nn nor a module class'
        )
    return _not_inplace(layer(**kwargs))


def _not_inplace(act: nn.Module) -> nn.Module:
    # The input is a slice of the hidden channels that the backward pass needs.
    for module in act.modules():
        if getattr(module, 'inplace', False):
            module.inplace = False
    return act


def build_norm(norm_cfg: dict | None, num_features: int) -> nn.Module:
    """Build a normalization layer, or ``nn.Identity`` for None.

    Args:
        norm_cfg (dict, optional): ``type`` ('BN', 'BN1d', 'SyncBN', 'LN' or 'TokenGN'),
            ``requires_grad`` of its parameters (True by default), and arguments of the layer.
        num_features (int): Number of channels.

    Raises:
        ValueError: If ``type`` is something else.
    """
    if norm_cfg is None:
        return nn.Identity()
    kwargs = dict(norm_cfg)
    name = kwargs.pop('type', None)
    if name not in _NORMS:
        raise ValueError(f'norm_cfg type must be one of {sorted(_NORMS)}, but got {name!r}')
    requires_grad = kwargs.pop('requires_grad', True)
    norm = _NORMS[name](num_features, **kwargs)
    for param in norm.parameters():
        param.requires_grad = requires_grad
    return norm


class DropPath(nn.Module):
    """Drop the whole residual branch of a sample at random (stochastic depth).

    Args:
        drop_prob (float): Probability of dropping. Defaults to 0.
    """

    def __init__(self, drop_prob: float = 0.0) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep_prob = 1 - self.drop_prob
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        return x * x.new_empty(shape).bernoulli_(keep_prob).div_(keep_prob)

    def extra_repr(self) -> str:
        return f'drop_prob={self.drop_prob}'


def check_input(ffn: nn.Module, x: torch.Tensor, identity: torch.Tensor | None) -> None:
    """Check the arguments of an FFN's ``forward``.

    Args:
        ffn (nn.Module): The FFN, with C as the attribute ``embed_dims``.
        x (torch.Tensor): The tokens, of shape (..., C).
        identity (torch.Tensor, optional): The shortcut's input, as in MMCV's FFN.

    Raises:
        ValueError: If the tokens are nested or have another number of channels, or ``identity`` is
            not ``x``.
    """
    if x.is_nested:
        raise ValueError('a nested tensor of tokens is not supported: pad it to (B, L, C)')
    if x.shape[-1] != ffn.embed_dims:
        raise ValueError(f'expected x of shape (..., {ffn.embed_dims}), but got {tuple(x.shape)}')
    if identity is not None and identity is not x:
        raise ValueError(
            'a channel-idle FFN contains its own norm and shortcut: identity '
            'must be x itself (replace the norm before it by nn.Identity)'
        )
