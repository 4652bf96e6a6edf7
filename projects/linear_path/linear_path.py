"""The FFN with a linear path: what channel idle deploys, trained as it is."""

import torch
import torch.nn as nn

from repa_mm.reparam import (
    ChannelIdleFFN,
    FFNParts,
    FoldedFFN,
    MergedFFN,
    batch_norm_affine,
    copy_affine_,
    copy_matrix_,
    double,
    fold,
    fold_norm,
    num_active_channels,
    weight_and_bias,
)


class LinearPathFFN(ChannelIdleFFN):
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
        *args, **kwargs: Those of :class:`ChannelIdleFFN`.

    Raises:
        ValueError: If the idle ratio is not in [0, 1), or as :class:`ChannelIdleFFN`.
    """

    label = 'FFN with a linear path'

    def __init__(
        self, embed_dims: int, feedforward_channels: int, idle_ratio: float = 0.75, *args, **kwargs
    ) -> None:
        num_active = num_active_channels(feedforward_channels, idle_ratio)
        if not num_active:
            raise ValueError(f'no channel would be active with idle_ratio={idle_ratio!r}')
        # All channels of this FFN are active: there is the linear path for the others.
        super().__init__(embed_dims, num_active, 0.0, *args, **kwargs)
        self.linear = nn.Linear(embed_dims, embed_dims)

    def forward_literal(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens of shape (B, L, C), not normalized, as :meth:`ChannelIdleFFN.forward`."""
        u = self.norm1(x if self.keeps_norm else x.reshape(-1, self.embed_dims))
        u = u.reshape(-1, self.embed_dims)
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
        has_norm = not isinstance(self.norm1, nn.Identity)
        w_in, b_in = weight_and_bias(ffn.fc1) if has_norm else fold_norm(ffn.norm, ffn.fc1)
        w_out, b_out = weight_and_bias(ffn.fc2)
        scale = ffn.scale
        if isinstance(self.layer_scale, nn.Parameter):
            self.layer_scale.copy_(torch.ones_like(self.layer_scale) if scale is None else scale)
        if scale is not None:  # that of this form is a copy of it
            scale = double(scale) if self.layer_scale is None else None
        folded = fold(w_in, b_in, w_out, b_out, self.num_active, layer_scale=scale)
        w, b, w_in, b_in, w_out = folded
        copy_affine_(self.norm1, ffn.norm)
        copy_matrix_(self.linear, w, b)
        copy_matrix_(self.fc1, w_in, b_in)
        copy_matrix_(self.fc2, w_out, torch.zeros_like(b))

    def fold(self) -> FoldedFFN:
        folded = super().fold()
        w, b = weight_and_bias(self.linear, 'its linear path')
        s, t = batch_norm_affine(self.norm1, w)
        w, b = w * s, b + w @ t
        if self.layer_scale is not None:
            scale = double(self.layer_scale)
            w, b = scale[:, None] * w, scale * b
        return folded._replace(w=w, b=folded.b + b)

    def merge(self) -> MergedFFN:
        """Compute the deploy form in float64.

        Raises:
            ValueError: As :meth:`ChannelIdleFFN.merge`.
        """
        norm = self.norm1 if self.keeps_norm else None
        like = self.fc1.weight
        return MergedFFN.of(self.fold(), self.act, like, norm, shortcut=self.shortcut)
