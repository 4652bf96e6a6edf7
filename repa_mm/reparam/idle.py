"""The training form of the channel-idle FFN of RePaFormer (RePaViT, ICML 2025)."""

import torch
import torch.nn as nn

from repa_mm.surgery import has_stock_forward

from .deploy_form import (
    KEPT_NORMS,
    DropPath,
    FoldedFFN,
    MergedFFN,
    build_activation,
    build_norm,
    check_input,
    check_norm,
    fold,
    num_active_channels,
)
from .folded import folded_forward, trains_folded
from .forms import CheckpointError, TrainingForm
from .numerics import (
    FFNParts,
    batch_norm_affine,
    check_dropouts,
    copy_affine_,
    copy_matrix_,
    double,
    fold_norm,
    is_batch_norm,
    weight_and_bias,
)


class ChannelIdleFFN(TrainingForm):
    """Training form of an FFN in which most hidden channels skip the activation.

    These *idle* channels, both BatchNorms and the shortcut collapse into one C x C matrix after
    training. With u = BN1(x), h = u W_in^T + b_in and a = [act(h_A), h_I] (active and idle), it
    returns x + DropPath(g * (BN2(a) W_out^T + b_out)): eq. 3 of the `paper
    <https://arxiv.org/abs/2505.21847>`_, with the biases that the paper omits, stochastic depth and
    the layer scale g. Dropout, if any, comes before and after the second linear layer.

    With ``norm_cfg=dict(type='LN')`` or ``'TokenGN'``, a LayerNorm or a GroupNorm comes before the
    FFN, and no norm is inside the FFN. Then only the idle product merges; the norm and the shortcut
    stay. With ``norm_cfg=None`` there is no norm, and the whole FFN merges. This fits blocks with
    the norm after the shortcut, as in DETR.

    Args:
        embed_dims (int): Number of channels C.
        feedforward_channels (int): Hidden width H.
        idle_ratio (float): Share of hidden channels that skip the activation, in [0, 1]. Defaults
            to 0.75.
        act_cfg (dict | nn.Module): An elementwise activation: its name in ``torch.nn`` (or class)
            as ``type``, and its arguments. Defaults to ``dict(type='GELU')``.
        norm_cfg (dict, optional): ``type`` 'BN', 'SyncBN', 'LN' or 'TokenGN' (a GroupNorm, by
            default of one group, over all tokens of a sample), and the norm's arguments; None for
            no norm. Defaults to ``dict(type='BN')``.
        drop_path (float): Stochastic depth rate. Defaults to 0.
        layer_scale_init_value (float): Initial value of the layer scale; 0 for none. Defaults to 0.
        drop_rate (float): Dropout rate; a rate above 0 rules out folded training. Defaults to 0.
        shortcut (bool): Whether the FFN adds its input to its output. Defaults to True.

    In training mode, the FFN skips the idle channels where that takes fewer multiply-adds (on a GPU
    in half precision: where it saves much memory, though not always time), with the same outputs,
    gradients and running statistics; see :mod:`repa_mm.reparam.folded`. The attribute
    ``training_path`` ('auto', 'literal' or 'folded') chooses the path, see
    :func:`~repa_mm.reparam.set_training_path_`.

    Raises:
        ValueError: If the idle ratio is not in [0, 1], or the activation or the norm is unknown.
    """

    label = 'channel-idle FFN'
    # The authors' checkpoints do not store the number of active channels.
    optional = (*TrainingForm.optional, 'num_active_channels')
    training_path = 'auto'
    computes = ('forward', 'forward_literal')

    def __init__(
        self,
        embed_dims: int,
        feedforward_channels: int,
        idle_ratio: float = 0.75,
        act_cfg: dict | nn.Module = dict(type='GELU'),
        norm_cfg: dict | None = dict(type='BN'),
        drop_path: float = 0.0,
        layer_scale_init_value: float = 0.0,
        drop_rate: float = 0.0,
        shortcut: bool = True,
    ) -> None:
        super().__init__()
        self.embed_dims = embed_dims
        self.feedforward_channels = feedforward_channels
        self.num_active = num_active_channels(feedforward_channels, idle_ratio)
        # The weights have the same shapes at every idle ratio, so checkpoints store the number.
        self.register_buffer('num_active_channels', torch.tensor(self.num_active))
        self.norm_cfg, self.shortcut = norm_cfg, shortcut
        self.norm1 = build_norm(norm_cfg, embed_dims)
        self.fc1 = nn.Linear(embed_dims, feedforward_channels)
        self.act = build_activation(act_cfg)
        self.norm2 = build_norm(None if self.keeps_norm else norm_cfg, feedforward_channels)
        self.fc2 = nn.Linear(feedforward_channels, embed_dims)
        scale = torch.full((embed_dims,), float(layer_scale_init_value or 0))
        self.layer_scale = nn.Parameter(scale) if layer_scale_init_value else None
        # After the second norm, so that dropout does not change the norm's statistics.
        self.drop = nn.Dropout(drop_rate)
        # Named as in mmcv's FFN.
        self.dropout_layer = DropPath(drop_path)

    @property
    def keeps_norm(self) -> bool:
        """True if the norm before the FFN depends on the sample, and stays when the rest merges."""
        return isinstance(self.norm1, KEPT_NORMS)

    @property
    def num_idle(self) -> int:
        """Number of hidden channels that skip the activation."""
        return self.feedforward_channels - self.num_active

    def forward(self, x: torch.Tensor, identity: torch.Tensor | None = None) -> torch.Tensor:
        """Compute eq. 3 of the paper for tokens x (B, L, C), not normalized.

        ``identity`` is the shortcut's input, as in mmcv's ``FFN``: x itself, or None.
        """
        check_input(self, x, identity)
        is_own = type(self).forward_literal is ChannelIdleFFN.forward_literal
        if self.training and is_own and trains_folded(self, x.numel() // self.embed_dims):
            return folded_forward(self, x)
        return self.forward_literal(x)

    def forward_literal(self, x: torch.Tensor) -> torch.Tensor:
        """Compute eq. 3 of the paper literally, as the reference for every other path."""
        u = self.norm1(x if self.keeps_norm else x.reshape(-1, self.embed_dims))
        sizes = self.num_active, self.num_idle
        # The backward pass of a split is one copy. That of an activation would keep, with a part of
        # the first layer's output, all of it.
        active, idle = self.fc1(u.reshape(-1, self.embed_dims)).split(sizes, dim=1)
        a = torch.cat([self.act(active.clone()), idle], dim=1)
        del active, idle  # frees the output of the first layer
        z = self.drop(self.fc2(self.drop(self.norm2(a)))).view(x.shape)
        if self.layer_scale is not None:
            z = z * self.layer_scale
        z = self.dropout_layer(z)
        return x + z if self.shortcut else z

    def fold(self) -> FoldedFFN:
        """Fold norms, layer scale and idle channels in float64 (paper eq. 4-6).

        The shortcut is not in the result. A norm that depends on the sample is not folded.
        """
        for name, others in (('norm1', (nn.Identity, *KEPT_NORMS)), ('norm2', (nn.Identity,))):
            norm = getattr(self, name)
            if not (is_batch_norm(norm) or has_stock_forward(norm, *others)):
                raise ValueError(
                    f'its {name} is a {type(norm).__name__}, and not a norm that merges'
                )
        check_dropouts(self)
        weights = *weight_and_bias(self.fc1, 'its fc1'), *weight_and_bias(self.fc2, 'its fc2')
        affine = (batch_norm_affine(n, w) for n, w in zip((self.norm1, self.norm2), weights[::2]))
        scale = None if self.layer_scale is None else double(self.layer_scale)
        return fold(*weights, self.num_active, *affine, scale)

    def fill(self, ffn: FFNParts) -> None:
        """Copy the weights of a norm and an FFN, whose first hidden channels become active.

        BatchNorm statistics do not change. With a kept norm and no idle channels, the form computes
        the same as the ordinary FFN; otherwise the weights are an initialization for training.
        """
        scale = None if ffn.scale is None else double(ffn.scale)
        if isinstance(self.layer_scale, nn.Parameter):
            self.layer_scale.copy_(torch.ones_like(self.layer_scale) if scale is None else scale)
            scale = None
        elif self.layer_scale is not None and scale is not None:  # a constant in both FFNs
            scale = scale / double(self.layer_scale)
        copy_affine_(self.norm1, ffn.norm)
        has_norm = not isinstance(self.norm1, nn.Identity)
        norm = nn.Identity() if has_norm else ffn.norm
        copy_matrix_(self.fc1, *fold_norm(norm, ffn.fc1))
        weight, bias = weight_and_bias(ffn.fc2)
        if scale is not None:
            weight, bias = scale[:, None] * weight, scale * bias
        copy_matrix_(self.fc2, weight, bias)

    def merge(self) -> MergedFFN:
        """Compute the deploy form (paper eq. 4-7) in float64, then in the dtype of ``fc1.weight``.

        Raises:
            ValueError: See :meth:`TrainingForm.merge` and :meth:`fold`; also if the merged weights
                exceed the range of the dtype.
        """
        folded = self.fold()
        # A kept norm also keeps the shortcut, which starts before the norm.
        norm = self.norm1 if self.keeps_norm else None
        idle = self.num_idle > 0
        return MergedFFN.of(folded, self.act, self.fc1.weight, norm, idle, self.shortcut)

    def owns(self, weights: dict) -> bool:
        return 'norm1.weight' in weights or super().owns(weights)

    def check_weights(self, weights: dict, name: str) -> None:
        if self.norm_cfg and 'norm1.weight' in weights:
            check_norm(self.keeps_norm, 'norm1.running_mean' not in weights, name)
        super().check_weights(weights, name)
        number = weights.get('num_active_channels')
        if number is not None and not number.is_meta and int(number) != self.num_active:
            hidden = self.feedforward_channels
            raise CheckpointError(
                f'the checkpoint has {int(number)} of {hidden} hidden channels active at {name!r}, '
                f'and the model {self.num_active}: build the model with idle_ratio='
                f'{1 - int(number) / hidden:.12g} there, as in the config of the checkpoint'
            )

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs) -> None:
        if any(key.startswith(prefix) for key in state_dict):
            known = torch.tensor(self.num_active)
            state_dict.setdefault(f'{prefix}num_active_channels', known)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f'num_active={self.num_active}, num_idle={self.num_idle}'
