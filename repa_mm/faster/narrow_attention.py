"""Attention of ViTs whose heads have other widths than C / heads.

:class:`~repa_mm.faster.attention.FastShiftWindowMSA` is that of Swins.
"""

import torch
import torch.nn as nn
from mmcv.cnn.bricks.transformer import MultiheadAttention as MMCVAttention
from mmpretrain.models.utils.attention import MultiheadAttention

from repa_mm.faster.attention import attend, split_heads


def self_attention(
    module: nn.Module,
    x: torch.Tensor,
    scale: float,
    dropout: float,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute self-attention of tokens (B, N, C) by a module's ``qkv`` and ``proj``.

    The layers decide the widths of the ``num_heads`` heads. ``dropout`` counts in training only.
    """
    q, k, v = split_heads(module.qkv(x), module.num_heads, module.proj.in_features)
    x = attend(q, k, v, scale, mask, dropout if module.training else 0.0)
    return module.proj(x.transpose(1, 2).flatten(2))


class NarrowMultiheadAttention(MultiheadAttention):
    """MMPretrain's ``MultiheadAttention``, with the widths of the heads as the weights have them.

    Queries and keys have r dimensions a head and values s, from ``qkv`` (h (2 r + s), C) and
    ``proj`` (C, h s). The scale of the logits stays that of the original width.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute self-attention of tokens (B, N, C)."""
        x = self_attention(self, x, self.head_dims**-0.5, self.attn_drop)
        return self.out_drop(self.gamma1(self.proj_drop(x)))


def input_layer(attention: nn.MultiheadAttention) -> nn.Linear:
    """Return PyTorch's projection to queries, keys and values as a layer of the same parameters."""
    rows, channels = attention.in_proj_weight.shape
    has_bias = attention.in_proj_bias is not None
    layer = nn.Linear(channels, rows, bias=has_bias, device='meta')
    layer.weight, layer.bias = attention.in_proj_weight, attention.in_proj_bias
    return layer


class NarrowSelfAttention(nn.Module):
    """mmcv's ``MultiheadAttention`` as MMSegmentation's ViT calls it, with heads of any widths."""

    def __init__(self, attention: MMCVAttention) -> None:
        super().__init__()
        self.num_heads, inner = attention.num_heads, attention.attn
        self.head_dims, self.attn_drop = inner.head_dim, inner.dropout
        self.qkv, self.proj = input_layer(inner), inner.out_proj
        self.proj_drop, self.out_drop = attention.proj_drop, attention.dropout_layer
        self.train(attention.training)

    def forward(self, query: torch.Tensor, identity: torch.Tensor | None = None) -> torch.Tensor:
        """Compute self-attention of tokens (B, N, C), and add ``identity`` or the tokens."""
        x = self_attention(self, query, self.head_dims**-0.5, self.attn_drop)
        return (query if identity is None else identity) + self.out_drop(self.proj_drop(x))


class NarrowTimmAttention(nn.Module):
    """timm's ``Attention``, with the widths of the heads as the weights have them."""

    def forward(
        self, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False
    ) -> torch.Tensor:
        """Compute self-attention of tokens (B, N, C)."""
        if is_causal:
            raise ValueError('narrower heads have no causal mask: give attn_mask instead')
        return self.proj_drop(self_attention(self, x, self.scale, self.attn_drop.p, attn_mask))
