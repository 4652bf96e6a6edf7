"""The deploy form of a channel-idle FFN, and the layers and folded weights of both forms.

x (N, C) are the tokens, H is the hidden width, A the number of active channels, and theta = 1 - A/H
the idle ratio.
"""

import copy
import math
from typing import NamedTuple

import torch
import torch.nn as nn

from repa_mm.surgery import has_stock_forward

from .forms import CheckpointError, DeployForm
from .numerics import rounded


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
    """Return the number of hidden channels that pass the activation, ceil(H (1 - theta))."""
    if not 0 <= idle_ratio <= 1:
        raise ValueError(
            'idle_ratio must be a number from 0 (every channel is activated) to 1 (none is), but '
            f'got {idle_ratio!r}'
        )
    # 1152 * (1 - 2/3) is 384.00000000000006 in floating point, not 385.
    return math.ceil(round(feedforward_channels * (1 - idle_ratio), 6))


def build_activation(act_cfg: dict | nn.Module) -> nn.Module:
    """Build an activation that is never in place.

    ``type`` is a name in ``torch.nn`` or a module class. A module is changed and returned.
    """
    act = act_cfg
    if not isinstance(act, nn.Module):
        kwargs = dict(act_cfg)
        layer = kwargs.pop('type')
        act = (getattr(nn, layer) if isinstance(layer, str) else layer)(**kwargs)
    # The input is a slice of the hidden channels that the backward pass needs.
    for module in act.modules():
        if getattr(module, 'inplace', False):
            module.inplace = False
    return act


def build_norm(norm_cfg: dict | None, num_features: int) -> nn.Module:
    """Build a normalization layer, or ``nn.Identity`` for None.

    ``norm_cfg`` has ``type``, 'BN', 'BN1d', 'SyncBN', 'LN' or 'TokenGN', ``requires_grad`` of the
    parameters (True by default), and arguments of the layer.
    """
    if norm_cfg is None:
        return nn.Identity()
    kwargs = dict(norm_cfg)
    name = kwargs.pop('type', None)
    if name not in _NORMS:
        raise ValueError(f'norm_cfg type must be one of {sorted(_NORMS)}, but got {name!r}')
    requires_grad = kwargs.pop('requires_grad', True)
    return _NORMS[name](num_features, **kwargs).requires_grad_(requires_grad)


class DropPath(nn.Module):
    """Drop the whole residual branch of a sample at random (stochastic depth)."""

    def __init__(self, drop_prob: float = 0.0) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep_prob = 1 - self.drop_prob
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        return x * x.new_empty(shape).bernoulli_(keep_prob).div_(keep_prob)


def check_input(ffn: nn.Module, x: torch.Tensor, identity: torch.Tensor | None) -> None:
    """Check that tokens x are (..., C), and that ``identity``, if any, is x itself."""
    if x.shape[-1] != ffn.embed_dims:
        raise ValueError(f'expected x of shape (..., {ffn.embed_dims}), but got {tuple(x.shape)}')
    if identity is not None and identity is not x:
        raise ValueError(
            'a channel-idle FFN contains its own norm and shortcut: identity '
            'must be x itself (replace the norm before it by nn.Identity)'
        )


def check_norm(kept: bool, found: bool, name: str) -> None:
    """Raise a :class:`CheckpointError` if one of the model and the checkpoint keeps the norm."""
    if kept != found:
        kinds = ('BN', 'has BatchNorms'), ('keep', "keeps its block's norm")
        raise CheckpointError(
            f'the channel-idle FFN {name!r} {kinds[found][1]} in the checkpoint, and '
            f'{kinds[kept][1]} in the model: build the model with ffn_norm_cfg=dict(type='
            f'{kinds[found][0]!r}), or with this norm_cfg in ChannelIdle'
        )


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

    The first layer has ``w_in`` (H, C), with the active channels first, and ``b_in`` (H, ), the
    second ``w_out`` (C, H) and ``b_out`` (C, ). ``affine1`` and ``affine2`` are s and t, each (C, )
    and (H, ), of norms s x + t before the layers, and ``layer_scale`` (C, ) is g. The operations
    are differentiable, and keep the dtype of the arguments.
    """
    if affine1 is not None:
        s, t = affine1
        w_in, b_in = w_in * s, b_in + w_in @ t
    if affine2 is not None:
        s, t = affine2
        w_out, b_out = w_out * s, b_out + w_out @ t
    if layer_scale is not None:
        w_out, b_out = layer_scale[:, None] * w_out, layer_scale * b_out
    # The backward pass of a split is one copy, that of two slices is two copies and a sum.
    sizes = num_active, len(w_in) - num_active
    w_in, idle_in = w_in.split(sizes)
    b_in, idle_b = b_in.split(sizes)
    w_out, idle_out = w_out.split(sizes, dim=1)
    return FoldedFFN(
        w=idle_out @ idle_in, b=idle_out @ idle_b + b_out, w_in=w_in, b_in=b_in, w_out=w_out
    )


def stack(folded: FoldedFFN, idle: bool = True) -> dict[str, torch.Tensor]:
    """Return the state dict of a :class:`MergedFFN` with these weights, with the shortcut in W.

    Without idle channels, W is only the shortcut, and is left out.
    """
    w, b, w_in, b_in, w_out = folded
    if idle:
        state = {'fc1.weight': torch.cat([w_in, w]), 'fc1.bias': torch.cat([b_in, b])}
    else:
        state = {'fc1.weight': w_in, 'fc1.bias': b_in, 'fc2.bias': b}
    if len(w_in):
        state['fc2.weight'] = w_out
    return state


class MergedFFN(DeployForm):
    """Deploy form of a :class:`ChannelIdleFFN` (paper eq. 7).

    It computes y = x W^T + b + act(x W_in^T + b_in) W_out^T in two matrix products. W_in (A, C) and
    W (C, C) are stacked in ``fc1``. The second product, with W_out (C, A) in ``fc2``, accumulates
    onto the linear half of the first.

    Args:
        embed_dims (int): Number of channels C.
        num_active (int): Number of activated channels A.
        act_cfg (dict | nn.Module): The activation.
        norm (nn.LayerNorm | nn.GroupNorm, optional): A norm that could not be merged. The shortcut
            then starts before the norm, and is added at run time.
        idle (bool): Whether there are idle channels, merged into W. Without idle channels (idle
            ratio 0), W is only the shortcut, and its product is left out. Defaults to True.
        shortcut (bool): Whether there is a shortcut. Defaults to True.
    """

    label = 'channel-idle FFN'
    optional = (*DeployForm.optional, 'norm.weight', 'norm.bias')

    def __init__(
        self,
        embed_dims: int,
        num_active: int,
        act_cfg: dict | nn.Module = dict(type='GELU'),
        norm: nn.Module | None = None,
        idle: bool = True,
        shortcut: bool = True,
    ) -> None:
        super().__init__()
        self.embed_dims = embed_dims
        self.num_active = num_active
        self.idle = idle
        # True if the shortcut is added at run time, and not in W.
        self.shortcut = shortcut and (norm is not None or not idle)
        self.movable = shortcut and not self.shortcut
        self.norm = nn.Identity() if norm is None else norm
        self.fc1 = nn.Linear(embed_dims, num_active + idle * embed_dims)
        self.act = build_activation(act_cfg)
        # With idle channels, the output bias is in fc1, next to W.
        self.fc2 = nn.Linear(num_active, embed_dims, bias=not idle) if num_active else None
        self._register_state_dict_hook(self._save_inside)

    @classmethod
    def of(
        cls,
        folded: FoldedFFN,
        act: nn.Module,
        like: torch.Tensor,
        norm: nn.Module | None = None,
        idle: bool = True,
        shortcut: bool = True,
    ) -> 'MergedFFN':
        """Build the deploy form from float64 weights without the shortcut, rounded once.

        Activation and norm are copied; ``like`` has the deploy form's device and dtype.
        """
        with torch.device('meta'):
            width, active = len(folded.w), len(folded.b_in)
            merged = cls(width, active, copy.deepcopy(act), copy.deepcopy(norm), idle, shortcut)
        if shortcut and norm is None:
            folded.w.diagonal().add_(1)
        for key, value in stack(folded, idle).items():
            layer, name = key.split('.')
            setattr(getattr(merged, layer), name, rounded(value, like))
        return merged

    def with_identity(self, weight: torch.Tensor, times: int) -> torch.Tensor:
        """Return the weight of ``fc1`` with the shortcut added to W so many times."""
        weight = weight.detach().clone()
        weight[self.num_active :].diagonal().add_(times)
        return weight

    def check_weights(self, weights: dict, name: str) -> None:
        if self.owns(weights):
            for key in ('norm.weight', 'norm.bias'):
                check_norm(key in self.state_dict(), key in weights, name)
        super().check_weights(weights, name)

    @staticmethod
    def _save_inside(self, state_dict, prefix, local_metadata) -> None:
        key = f'{prefix}fc1.weight'
        # Tracers look for the parameter itself (keep_vars=True).
        if self.movable and self.shortcut and state_dict[key] is not self.fc1.weight:
            state_dict[key] = self.with_identity(state_dict[key], 1)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        key = f'{prefix}fc1.weight'
        if self.movable and self.shortcut and key in state_dict:
            state_dict[key] = self.with_identity(state_dict[key], -1)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def inference(self, x: torch.Tensor, identity: torch.Tensor | None = None) -> torch.Tensor:
        """Compute :meth:`ChannelIdleFFN.forward` for x of shape (B, L, C)."""
        check_input(self, x, identity)
        h = self.fc1(self.norm(x).reshape(-1, self.embed_dims))
        if not self.idle:
            y = self.fc2(self.act(h))
        elif self.fc2 is None:
            y = h
        else:
            a, linear = self.act(h[:, : self.num_active]), h[:, self.num_active :]
            if not self.accumulates():
                y = linear + self.fc2(a)
            # In place, a GPU need not copy the linear half first. Autocast leaves this to us.
            elif h.is_cuda and not torch.is_grad_enabled():
                y = linear.addmm_(a.to(h.dtype), self.fc2.weight.t().to(h.dtype))
            else:
                y = torch.addmm(linear, a, self.fc2.weight.t())
        y = y.view(x.shape)
        return x + y if self.shortcut else y

    @torch.compiler.assume_constant_result
    def accumulates(self) -> bool:
        """Return True if a product with the weight of ``fc2`` is all that ``fc2`` computes."""
        return has_stock_forward(self.fc2, nn.Linear)

    def extra_repr(self) -> str:
        return f'num_active={self.num_active}, idle={self.idle}, shortcut={self.shortcut}'


@torch.no_grad()
def set_shortcut_(model: nn.Module, side: str) -> nn.Module:
    """Put the shortcut of every :class:`MergedFFN` of a model into W, or add it at run time.

    A shortcut inside W costs nothing. With the shortcut outside, W keeps all its digits in half
    precision (bfloat16 resolves 2^-8 next to the 1 on the diagonal), and autocast adds the shortcut
    in float32. Call this function before a cast. State dicts always have the shortcut inside W,
    except with ``state_dict(keep_vars=True)``, which returns the parameters as they are.

    Raises:
        ValueError: If ``side`` is neither 'inside' nor 'outside'.
    """
    if side not in ('inside', 'outside'):
        raise ValueError(f"the shortcut is 'inside' or 'outside', but got {side!r}")
    is_outside = side == 'outside'
    for ffn in model.modules():
        if isinstance(ffn, MergedFFN) and ffn.movable and ffn.shortcut != is_outside:
            ffn.shortcut = is_outside
            # At another address, since a CUDA graph may have been captured with the old form.
            ffn.fc1.weight.data = ffn.with_identity(ffn.fc1.weight, -1 if is_outside else 1)
    return model
