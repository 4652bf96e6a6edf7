"""The channel-idle FFN and what it merges into.

`RePaFormer <https://arxiv.org/abs/2505.21847>`_ (RePaViT, ICML 2025) lets only
the first A of an FFN's H hidden channels pass the activation. The other H - A
*idle* channels are linear from input to output, so that after training they
collapse, together with both BatchNorms and the shortcut, into one C x C matrix.

Symbols, used throughout: x (N, C) are the tokens, H the hidden width, A the
number of active channels, theta = 1 - A/H the idle ratio.
"""

import copy
import itertools
import math
import numbers

import torch
import torch.nn as nn

from .folded import choose_path, folded_forward, recomputing

_NORMS = {
    'BN': nn.BatchNorm1d,
    'BN1d': nn.BatchNorm1d,
    'SyncBN': nn.SyncBatchNorm,
    'LN': nn.LayerNorm,
}


class CheckpointError(RuntimeError):
    """A checkpoint that does not hold what the model needs."""


def num_active_channels(feedforward_channels: int, idle_ratio: float) -> int:
    """Number of hidden channels that pass the activation, ceil(H (1 - theta)).

    Args:
        feedforward_channels (int): Hidden width H.
        idle_ratio (float): Idle ratio theta in [0, 1].

    Raises:
        ValueError: If the idle ratio is not a number in [0, 1].
    """
    if (
        isinstance(idle_ratio, bool)
        or not isinstance(idle_ratio, numbers.Real)
        or not 0 <= idle_ratio <= 1
    ):
        raise ValueError(
            'idle_ratio must be a number from 0 (every channel '
            'is activated) to 1 (none is), but got '
            f'{idle_ratio!r}'
        )
    # 1152 * (1 - 2/3) is 384.00000000000006 in floating point, not 385.
    return math.ceil(round(feedforward_channels * (1 - idle_ratio), 6))


def _build_activation(act_cfg: dict | nn.Module) -> nn.Module:
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
    # The input is a part of the hidden channels, and is needed again in the
    # backward pass.
    if getattr(act, 'inplace', False):
        act.inplace = False
    return act


def _build_norm(norm_cfg: dict, num_features: int) -> nn.Module:
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
    """Stochastic depth: drops the whole residual branch of a sample.

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


class TrainingForm(nn.Module):
    """A module that can be trained, and merged into a smaller one afterwards.

    A subclass implements :meth:`merge`; everything else (the model walk, the
    hook, the tools) follows from it.
    """

    def merge(self) -> 'DeployForm':
        """A new module that computes what this one computes in eval mode."""
        raise NotImplementedError

    def switch_to_deploy(self) -> None:
        """Become the deploy form, in place (OpenMMLab's convention)."""
        self._become(self.merge())

    def _become(self, merged: 'DeployForm') -> None:
        # Changing the class instead of replacing the module in its parent
        # needs no knowledge of the parent, and reaches every reference.
        self.__class__, self.__dict__ = type(merged), merged.__dict__


class DeployForm(nn.Module):
    """What a :class:`TrainingForm` merges into; for inference only."""

    def switch_to_deploy(self) -> None:
        """Nothing to do: this is the deploy form."""

    def forward(self, *args, **kwargs):
        if self.training and torch.is_grad_enabled():
            raise RuntimeError(
                f'a {type(self).__name__} is in its deploy form, which is for '
                'inference: train the training form (deploy=False and a '
                'checkpoint that is not reparameterized), or call model.eval()'
            )
        return self.inference(*args, **kwargs)


def _check_input(ffn: nn.Module, x: torch.Tensor, identity: torch.Tensor | None) -> None:
    if x.shape[-1] != ffn.embed_dims:
        raise ValueError(f'expected x of shape (..., {ffn.embed_dims}), but got {tuple(x.shape)}')
    if identity is not None and identity is not x:
        raise ValueError(
            'a channel-idle FFN contains its own norm and shortcut: identity '
            'must be x itself (replace the norm before it by nn.Identity)'
        )


def _of_deploy_form(weights: dict) -> bool:
    """Whether an FFN's weights are merged: fc1 without a norm1 before it."""
    return 'fc1.weight' in weights and not any(key.startswith('norm1.') for key in weights)


def check_weights(ffn: nn.Module, weights: dict, name: str) -> None:
    """Check that weights are those of an FFN in the form that it has.

    Args:
        ffn (nn.Module): A :class:`ChannelIdleFFN` or :class:`MergedFFN`.
        weights (dict): What a checkpoint holds for it.
        name (str): Its name in the model, for the message.

    Raises:
        CheckpointError: If they are of the other form, of an ordinary FFN, or
            of other shapes.
    """
    # mmcv's FFN has `layers`, PoolFormer's has convolutions.
    if 'layers.1.weight' in weights or (
        'fc1.weight' in weights and weights['fc1.weight'].ndim == 4
    ):
        raise CheckpointError(
            f'the checkpoint holds an ordinary FFN at {name!r} where the model'
            ' has a channel-idle one: it is of the vanilla backbone, not of '
            'its RePa counterpart'
        )
    if _of_deploy_form(weights) and isinstance(ffn, TrainingForm):
        raise CheckpointError(
            f'the checkpoint is reparameterized (merged FFN at {name!r}), but '
            'the model is in its training form: build the model with '
            'deploy=True to run it; a merged checkpoint cannot be trained'
        )
    if 'fc1.weight' in weights and not _of_deploy_form(weights) and isinstance(ffn, DeployForm):
        raise CheckpointError(
            f'the checkpoint is in the training form (at {name!r}), but the '
            'model was built with deploy=True: load it into a model with '
            'deploy=False and reparameterize that, or convert the checkpoint '
            'with tools/reparameterize.py'
        )
    for key, own in ffn.state_dict().items():
        if key.endswith('num_batches_tracked'):
            continue
        if key not in weights:
            raise CheckpointError(
                f'the checkpoint has no {name}.{key}: it is of another architecture than the model'
            )
        if weights[key].shape != own.shape:
            raise CheckpointError(
                f'{name}.{key} has shape {tuple(weights[key].shape)} in the '
                f'checkpoint and {tuple(own.shape)} in the model: they differ '
                'in architecture or idle ratio'
            )


def _count(tensor: torch.Tensor, wrong: torch.Tensor, what: str) -> str:
    n = int(wrong.sum())
    return (
        f'has {n} value{"s" * (n > 1)} (of {tensor.numel()}) that {"are" if n > 1 else "is"} {what}'
    )


def _any(mask: torch.Tensor) -> bool:
    """Whether an element is true; on the meta device there are none."""
    return not mask.is_meta and bool(mask.any())


def check_finite(module: nn.Module) -> None:
    """Check the parameters and the BatchNorm statistics of a module.

    Args:
        module (nn.Module): Any module or model.

    Raises:
        ValueError: Naming the first one with values that are infinite, not a
            number, or a variance below 0.
    """
    tensors = itertools.chain(
        module.named_parameters(),
        (
            item
            for item in module.named_buffers()
            if item[0].endswith(('running_mean', 'running_var', 'layer_scale'))
        ),
    )
    found = []
    for name, tensor in tensors:
        infinite = ~tensor.isfinite()
        if _any(infinite):
            found.append(f'{name} {_count(tensor, infinite, "not finite")}')
        elif name.endswith('running_var') and _any(tensor < 0):
            found.append(f'{name} {_count(tensor, tensor < 0, "negative")}')
    if found:
        more = f' (and {len(found) - 1} more like it)' * (len(found) > 1)
        raise ValueError(found[0] + more)


class ChannelIdleFFN(TrainingForm):
    """Training form of an FFN most of whose channels skip the activation.

    With u = BN1(x), h = u W_in^T + b_in and a = [act(h_A), h_I] (active and
    idle channels), it returns x + DropPath(g * (BN2(a) W_out^T + b_out)): eq. 3
    of the `paper <https://arxiv.org/abs/2505.21847>`_, with the biases that it
    omits, stochastic depth and the layer scale g. Dropout, where asked for,
    comes before and after the second linear layer.

    With ``norm_cfg=dict(type='LN')`` there is a LayerNorm before the FFN and
    no norm inside it. Then only the idle product merges; the LayerNorm and the
    shortcut stay.

    Args:
        embed_dims (int): Number of channels C.
        feedforward_channels (int): Hidden width H.
        idle_ratio (float): Share of hidden channels that skip the activation,
            in [0, 1]. Defaults to 0.75.
        act_cfg (dict | nn.Module): An elementwise activation: its name in
            ``torch.nn`` (or class) as ``type``, and its arguments.
            Defaults to ``dict(type='GELU')``.
        norm_cfg (dict): ``type`` 'BN', 'SyncBN' or 'LN', and the norm's
            arguments. Defaults to ``dict(type='BN')``.
        drop_path (float): Stochastic depth rate. Defaults to 0.
        layer_scale_init_value (float): Initial value of the layer scale; 0 for
            none. Defaults to 0.
        drop_rate (float): Dropout rate; every hidden channel is computed in
            training if it is not 0. Defaults to 0.

    In training mode the idle channels are not computed where that is faster,
    see :mod:`repa_mm.reparam.folded`: outputs, gradients and running
    statistics are the same. ``training_path`` ('auto', 'literal' or 'folded')
    forces one or the other.

    Raises:
        ValueError: If the idle ratio is not in [0, 1], or the activation or
            the norm is unknown.
    """

    training_path = 'auto'

    def __init__(
        self,
        embed_dims: int,
        feedforward_channels: int,
        idle_ratio: float = 0.75,
        act_cfg: dict | nn.Module = dict(type='GELU'),
        norm_cfg: dict = dict(type='BN'),
        drop_path: float = 0.0,
        layer_scale_init_value: float = 0.0,
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.embed_dims = embed_dims
        self.feedforward_channels = feedforward_channels
        self.num_active = num_active_channels(feedforward_channels, idle_ratio)
        self.norm1 = _build_norm(norm_cfg, embed_dims)
        self.fc1 = nn.Linear(embed_dims, feedforward_channels)
        self.act = _build_activation(act_cfg)
        self.norm2 = (
            nn.Identity()
            if isinstance(self.norm1, nn.LayerNorm)
            else _build_norm(norm_cfg, feedforward_channels)
        )
        self.fc2 = nn.Linear(feedforward_channels, embed_dims)
        self.layer_scale = (
            nn.Parameter(torch.ones(embed_dims) * layer_scale_init_value)
            if layer_scale_init_value
            else None
        )
        # After the second norm: its statistics are to be those of inference.
        self.drop = nn.Dropout(drop_rate)
        # Named as in mmcv's FFN.
        self.dropout_layer = DropPath(drop_path)

    def forward(self, x: torch.Tensor, identity: torch.Tensor | None = None) -> torch.Tensor:
        """Eq. 3 of the paper.

        Args:
            x (torch.Tensor): Tokens of shape (B, L, C), not normalized.
            identity (torch.Tensor, optional): The shortcut, as mmcv's ``FFN``
                takes it. It can only be x itself.

        Returns:
            torch.Tensor: Of the shape of x.
        """
        _check_input(self, x, identity)
        if not self.training:
            return self.forward_literal(x)
        num_tokens = x.numel() // self.embed_dims
        if choose_path(self, num_tokens) == 'folded':
            return folded_forward(self, x)
        if not recomputing():
            return self.forward_literal(x)
        norms = self.norm1, self.norm2
        buffers = [dict(norm._buffers) for norm in norms]
        try:
            for norm in norms:
                norm._buffers.update(copy.deepcopy(norm._buffers))
            return self.forward_literal(x)
        finally:
            for norm, own in zip(norms, buffers):
                norm._buffers.update(own)

    def forward_literal(self, x: torch.Tensor) -> torch.Tensor:
        """Eq. 3 of the paper, literally: what every other path must equal.

        Args:
            x (torch.Tensor): Tokens of shape (B, L, C).

        Returns:
            torch.Tensor: Of the shape of x.
        """
        u = self.norm1(x.reshape(-1, self.embed_dims))
        h = self.fc1(u)
        active, idle = h.tensor_split([self.num_active], dim=1)
        a = torch.cat([self.act(active), idle], dim=1)
        z = self.drop(self.fc2(self.drop(self.norm2(a)))).view(x.shape)
        if self.layer_scale is not None:
            z = z * self.layer_scale
        return x + self.dropout_layer(z)

    @torch.no_grad()
    def merge(self) -> 'MergedFFN':
        """The deploy form (paper eq. 4-7), computed in float64.

        Returns:
            MergedFFN: On the device and of the dtype of ``fc1.weight``.

        Raises:
            ValueError: If a BatchNorm has no running statistics; weights or
                statistics are not finite, or a variance is negative; the
                merged weights exceed the range of the dtype.
        """
        check_finite(self)
        w_in, b_in, w_out, b_out = map(
            _double, (self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
        )
        s1, t1 = _scale_and_shift(self.norm1, w_in)
        s2, t2 = _scale_and_shift(self.norm2, w_out)
        b_in = b_in + w_in @ t1
        w_in = w_in * s1
        b_out = b_out + w_out @ t2
        w_out = w_out * s2
        if self.layer_scale is not None:
            g = _double(self.layer_scale)
            b_out = g * b_out
            w_out = g[:, None] * w_out

        # A LayerNorm depends on the sample: it stays, and with it the shortcut
        # from before it.
        norm = self.norm1 if isinstance(self.norm1, nn.LayerNorm) else None
        num_active = self.num_active
        num_idle = self.feedforward_channels - num_active
        with torch.device('meta'):
            merged = MergedFFN(
                self.embed_dims,
                num_active,
                act_cfg=copy.deepcopy(self.act),
                norm=copy.deepcopy(norm),
                idle=num_idle > 0,
            )
        if num_idle:
            w = w_out[:, num_active:] @ w_in[num_active:]
            if norm is None:
                w.diagonal().add_(1)
            b = w_out[:, num_active:] @ b_in[num_active:] + b_out
            _assign(
                self,
                merged.fc1,
                torch.cat([w_in[:num_active], w]),
                torch.cat([b_in[:num_active], b]),
            )
            if num_active:
                _assign(self, merged.fc2, w_out[:, :num_active])
        else:
            _assign(self, merged.fc1, w_in, b_in)
            _assign(self, merged.fc2, w_out, b_out)
        return merged.train(self.training)

    def extra_repr(self) -> str:
        return (
            f'num_active={self.num_active}, num_idle={self.feedforward_channels - self.num_active}'
        )


class MergedFFN(DeployForm):
    """Deploy form of a :class:`ChannelIdleFFN` (paper eq. 7).

    y = x W^T + b + act(x W_in^T + b_in) W_out^T in two matrix products: W_in
    (A, C) and W (C, C) are stacked in ``fc1``, and the second product, with
    W_out (C, A) in ``fc2``, accumulates onto the linear half of the first.

    Args:
        embed_dims (int): Number of channels C.
        num_active (int): Number of activated channels A.
        act_cfg (dict | nn.Module): The activation.
        norm (nn.LayerNorm, optional): A norm that could not be merged. With
            it, the shortcut starts before it and is added at run time.
        idle (bool): Whether there are idle channels, merged into W. Without
            (idle ratio 0) W is the shortcut alone and is not multiplied by.
            Defaults to True.
    """

    def __init__(
        self,
        embed_dims: int,
        num_active: int,
        act_cfg: dict | nn.Module = dict(type='GELU'),
        norm: nn.Module | None = None,
        idle: bool = True,
    ) -> None:
        super().__init__()
        self.embed_dims = embed_dims
        self.num_active = num_active
        self.idle = idle
        # Whether it is added at run time; in W where there is one to put it in.
        self.shortcut = norm is not None or not idle
        self._movable = not self.shortcut
        self.norm = nn.Identity() if norm is None else norm
        self.fc1 = nn.Linear(embed_dims, num_active + idle * embed_dims)
        self.act = _build_activation(act_cfg)
        # With idle channels the output bias is in fc1, beside W.
        self.fc2 = nn.Linear(num_active, embed_dims, bias=not idle) if num_active else None
        self._register_state_dict_hook(self._save_inside)

    @torch.no_grad()
    def set_shortcut(self, where: str) -> None:
        """Put the shortcut into W, or take it out and add it at run time.

        Inside, it costs nothing. Outside, W keeps all its digits in half
        precision (bfloat16 resolves 2^-8 next to the 1 on the diagonal), and
        under autocast the sum is one of float32. Call it before a cast.
        State dicts always have it inside.

        Args:
            where (str): 'inside' or 'outside'.

        Raises:
            ValueError: If ``where`` is something else.
        """
        if where not in ('inside', 'outside'):
            raise ValueError(f"the shortcut is 'inside' or 'outside', but got {where!r}")
        if self._movable and self.shortcut != (where == 'outside'):
            self.shortcut = not self.shortcut
            self.fc1.weight.copy_(self._with_identity(self.fc1.weight, -1 if self.shortcut else 1))

    def _with_identity(self, weight: torch.Tensor, times: int) -> torch.Tensor:
        weight = weight.detach().clone()
        weight[self.num_active :].diagonal().add_(times)
        return weight

    @staticmethod
    def _save_inside(self, state_dict, prefix, local_metadata) -> None:
        if self._movable and self.shortcut:
            key = f'{prefix}fc1.weight'
            state_dict[key] = self._with_identity(state_dict[key], 1)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        key = f'{prefix}fc1.weight'
        if self._movable and self.shortcut and key in state_dict:
            state_dict[key] = self._with_identity(state_dict[key], -1)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def inference(self, x: torch.Tensor, identity: torch.Tensor | None = None) -> torch.Tensor:
        """As :meth:`ChannelIdleFFN.forward`, x of shape (B, L, C)."""
        _check_input(self, x, identity)
        h = self.fc1(self.norm(x).reshape(-1, self.embed_dims))
        if not self.idle:
            y = self.fc2(self.act(h))
        elif self.fc2 is None:
            y = h
        else:
            y = torch.addmm(
                h[:, self.num_active :], self.act(h[:, : self.num_active]), self.fc2.weight.t()
            )
        y = y.view(x.shape)
        return x + y if self.shortcut else y

    def extra_repr(self) -> str:
        return f'num_active={self.num_active}, idle={self.idle}, shortcut={self.shortcut}'


def _double(tensor: torch.Tensor) -> torch.Tensor:
    """In float64, on the CPU where the device has none (MPS)."""
    if tensor.device.type == 'mps':
        tensor = tensor.cpu()
    return tensor.detach().double()


def _scale_and_shift(norm: nn.Module, like: torch.Tensor):
    """S and t of a BatchNorm, norm(x) = s x + t; 1 and 0 of any other module.

    Both are float64 vectors, of as many elements as ``like`` has columns.
    """
    s = like.new_ones(like.shape[1])
    t = torch.zeros_like(s)
    # By attribute, since mmcv's SyncBatchNorm is no subclass of torch's.
    if not hasattr(norm, 'running_mean'):
        return s, t
    if norm.running_mean is None:
        raise ValueError(
            'a BatchNorm without running statistics (track_running_stats=False) cannot be merged'
        )
    s = (_double(norm.running_var) + norm.eps).rsqrt()
    if _any(s.isinf()):
        raise ValueError('a BatchNorm with eps=0 and channels of variance 0 cannot be merged')
    if norm.affine:
        s, t = s * _double(norm.weight), _double(norm.bias)
    return s, t - s * _double(norm.running_mean)


def _assign(
    source: ChannelIdleFFN,
    linear: nn.Linear,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    like = source.fc1.weight
    for name, value in (('weight', weight), ('bias', bias)):
        if value is None:
            continue
        rounded = value.to(like)
        if _any(~rounded.isfinite()):
            raise ValueError(
                f'the merged weights, up to {value.abs().max():.1e}, exceed '
                f'the range of {like.dtype}: merge the model in another dtype'
            )
        setattr(linear, name, nn.Parameter(rounded))
