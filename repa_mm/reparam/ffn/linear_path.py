"""The FFN with a linear path: what channel idle deploys, trained as it is."""

import torch
import torch.nn as nn

from ..autograd import kept_statistics
from ..forms import TrainingForm
from ..numerics import batch_norm_affine, check_dropouts, double, exact, is_batch_norm
from ..parts import FFNParts, copy_affine, copy_matrix, fold_norm, matrix
from .layers import DropPath, build_activation, build_norm, check_input, num_active_channels
from .merged import MergedFFN
from .weights import fold


class LinearPathFFN(TrainingForm):
    """Training form with the weights of a :class:`MergedFFN`: a linear path beside active channels.

    With u = BN1(x) and h = BN2(act(u W_in^T + b_in)) it returns x + DropPath(g * (u W^T + b + h
    W_out^T + b_out)), where W is C x C: a :class:`ChannelIdleFFN` whose idle channels have become
    one matrix before training. The `paper <https://arxiv.org/abs/2505.21847>`_ compares channel
    idle with such a training, to show what the parameters of idle channels are worth.

    Args:
        embed_dims (int): Number of channels C.
        feedforward_channels (int): Hidden width H of the ordinary FFN.
        idle_ratio (float): Share of the hidden channels whose place the linear path takes, in [0,
            1): there are A = ceil(H (1 - idle_ratio)) active channels. Defaults to 0.75.
        act_cfg (dict | nn.Module): As for :class:`ChannelIdleFFN`. Defaults to
            ``dict(type='GELU')``.
        norm_cfg (dict, optional): ``type`` 'BN' or 'SyncBN', and the norm's arguments. None leaves
            both norms out. Defaults to ``dict(type='BN')``.
        drop_path (float): Stochastic depth rate. Defaults to 0.
        layer_scale_init_value (float): Initial value of the layer scale; 0 for none. Defaults to 0.
        drop_rate (float): Dropout rate of active channels and output. Defaults to 0.
        shortcut (bool): Whether the FFN adds its input to its output. Defaults to True.

    Raises:
        ValueError: If the idle ratio is not in [0, 1), or the norm is no BatchNorm.
    """

    label = 'FFN with a linear path'

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
        self.embed_dims, self.shortcut = embed_dims, shortcut
        self.num_active = num_active_channels(feedforward_channels, idle_ratio)
        if not self.num_active:
            raise ValueError(f'no channel would be active with idle_ratio={idle_ratio!r}')
        self.norm1, self.norm2 = (build_norm(norm_cfg, n) for n in (embed_dims, self.num_active))
        self._check_norms()
        self.linear = nn.Linear(embed_dims, embed_dims)
        self.fc1 = nn.Linear(embed_dims, self.num_active)
        self.act = build_activation(act_cfg)
        self.fc2 = nn.Linear(self.num_active, embed_dims)
        self.layer_scale = (
            nn.Parameter(torch.full((embed_dims,), float(layer_scale_init_value)))
            if layer_scale_init_value
            else None
        )
        self.drop = nn.Dropout(drop_rate)
        self.dropout_layer = DropPath(drop_path)

    def _check_norms(self) -> None:
        for norm in (self.norm1, self.norm2):
            if type(norm) is not nn.Identity and not is_batch_norm(norm):
                raise ValueError(f'its norm is a {type(norm).__name__}, and not a BatchNorm')

    def forward(self, x: torch.Tensor, identity: torch.Tensor | None = None) -> torch.Tensor:
        """Tokens of shape (B, L, C), not normalized, as :meth:`ChannelIdleFFN.forward`."""
        check_input(self, x, identity)
        with kept_statistics(self.norm1, self.norm2):
            u = self.norm1(x.reshape(-1, self.embed_dims))
            h = self.drop(self.norm2(self.act(self.fc1(u))))
        z = self.drop(self.linear(u) + self.fc2(h)).view(x.shape)
        if self.layer_scale is not None:
            z = z * self.layer_scale
        z = self.dropout_layer(z)
        return x + z if self.shortcut else z

    def fill(self, ffn: FFNParts) -> None:
        """Take the weights of an ordinary FFN without the activation of its last channels.

        Those channels become the linear path. Scale and shift of the norm go into the BatchNorm,
        whose statistics stay as they are, or into the matrices if there is none.
        """
        has_norm = is_batch_norm(self.norm1)
        w_in, b_in = matrix(ffn.fc1) if has_norm else fold_norm(ffn.norm, ffn.fc1)
        w_out, b_out = matrix(ffn.fc2)
        b_in = w_in.new_zeros(len(w_in)) if b_in is None else b_in
        b_out = w_out.new_zeros(len(w_out)) if b_out is None else b_out
        scale = ffn.scale
        if isinstance(self.layer_scale, nn.Parameter):
            self.layer_scale.copy_(torch.ones_like(self.layer_scale) if scale is None else scale)
        if scale is not None:  # that of this form is a copy of it
            scale = double(scale) if self.layer_scale is None else None
        folded = fold(w_in, b_in, w_out, b_out, self.num_active, layer_scale=scale)
        w, b, w_in, b_in, w_out = folded
        copy_affine(self.norm1, ffn.norm)
        copy_matrix(self.linear, w, b)
        copy_matrix(self.fc1, w_in, b_in)
        copy_matrix(self.fc2, w_out, None)

    def merge(self) -> MergedFFN:
        """Compute the deploy form in float64.

        Raises:
            ValueError: As :meth:`TrainingForm.merge`; or if a layer is not what it was built as.
        """
        self._check_norms()
        check_dropouts(self)
        w, b = exact(self.linear, 'its linear path')
        w_in, b_in = exact(self.fc1, 'its fc1')
        w_out, b_out = exact(self.fc2, 'its fc2')
        s, t = batch_norm_affine(self.norm2, w_out)
        # The linear path as idle channels with the identity behind them.
        folded = fold(
            torch.cat([w_in, w]),
            torch.cat([b_in, b]),
            torch.cat([w_out * s, torch.eye(len(w)).to(w)], 1),
            b_out + w_out @ t,
            self.num_active,
            batch_norm_affine(self.norm1, w_in),
            layer_scale=None if self.layer_scale is None else double(self.layer_scale),
        )
        return MergedFFN.of(folded, self.act, self.fc1.weight, shortcut=self.shortcut)

    def extra_repr(self) -> str:
        return f'num_active={self.num_active}'
