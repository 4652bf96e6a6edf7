"""Putting progressive norms and activations into transformers."""

from typing import NamedTuple

import torch
import torch.nn as nn
from mmcv.cnn import Linear
from mmcv.cnn.bricks.transformer import FFN
from mmpretrain.models.utils.attention import MultiheadAttention, ShiftWindowMSA, WindowMSA

from repa_mm.models.attention import FastShiftWindowMSA
from repa_mm.models.windows import is_traced
from repa_mm.reparam import (
    ChannelIdleFFN,
    NormedLinear,
    ProgressiveIdleFFN,
    ProgressiveNorm,
    become,
)

# Blocks whose first norm is that of the attention alone, and the second that of the FFN.
_BLOCKS = 'SwinBlock', 'TransformerEncoderLayer'


class NormedShiftWindowMSA(FastShiftWindowMSA):
    """Shifted window attention whose queries, keys and values have a progressive norm in them.

    A map is padded behind the norm, with zeros that are not normalized.
    """

    def forward(self, query: torch.Tensor, hw_shape) -> torch.Tensor:
        """As :meth:`FastShiftWindowMSA.forward`, of tokens that are not normalized."""
        layer = self.w_msa.qkv
        return super().forward(
            layer.norm(query) if isinstance(layer, NormedLinear) else query, hw_shape
        )

    def _qkv(self, windows: torch.Tensor, padded: torch.Tensor | None) -> torch.Tensor:
        layer = self.w_msa.qkv
        if isinstance(layer, NormedLinear):
            return layer.linear(windows)
        qkv = layer(windows)
        if padded is None:
            return qkv
        rows = qkv.view(-1, padded.shape[0], qkv.shape[-1])
        padding = layer.padding.to(qkv.dtype)
        # Inductor of torch 2.1 fails on selections whose condition it can compute.
        if is_traced():
            rows = rows * ~padded + padding * padded
        else:
            rows = torch.where(padded, padding, rows)
        return rows.view(qkv.shape)


class NormPlace(NamedTuple):
    """The name of a norm that became progressive, and where its parts are now.

    ``linear`` is the linear layer that it merges into, '' for none.
    """

    norm: str
    linear: str

    def moved(self) -> dict[str, str]:
        """New names by those in the ordinary backbone: of the LayerNorm and of the linear layer."""
        if not self.linear:
            return {self.norm: f'{self.norm}.ln'}
        return {self.norm: f'{self.linear}.norm.ln', self.linear: f'{self.linear}.linear'}

    @property
    def form(self) -> str:
        """Name of the progressive norm."""
        return f'{self.linear}.norm' if self.linear else self.norm


def progressive_norms(model: nn.Module, norm_cfg: dict = dict(type='BN')) -> list[NormPlace]:
    """Make the LayerNorms of a model's blocks progressive, in place.

    A norm before an attention or an ordinary FFN of mmpretrain merges into its first linear layer;
    any other one into an affine map.

    Args:
        model (nn.Module): A ViT or Swin, or a model with one.
        norm_cfg (dict): The norm that merges, 'BN' or 'SyncBN'. Defaults to ``dict(type='BN')``.

    Returns:
        list[NormPlace]: The places, by name.

    Raises:
        ValueError: If there is no LayerNorm in a block of a ViT or Swin.
    """
    places = []
    for name, block in list(model.named_modules()):
        if type(block).__name__ not in _BLOCKS:
            continue
        for child, norm in list(block.named_children()):
            if type(norm) is nn.LayerNorm:
                linear = _put_norm(block, child, norm, norm_cfg)
                places.append(NormPlace(f'{name}.{child}', linear and f'{name}.{linear}'))
    if not places:
        raise ValueError(
            f'{type(model).__name__} has no LayerNorm in a block of a ViT or Swin, '
            f'{" or ".join(_BLOCKS)}'
        )
    return places


def _put_norm(block: nn.Module, child: str, norm: nn.LayerNorm, norm_cfg: dict) -> str:
    """Put a progressive norm in the place of a LayerNorm; the linear layer that it went into."""
    progressive = ProgressiveNorm(len(norm.weight), norm_cfg, norm.eps)
    progressive.to(norm.weight).train(norm.training)
    progressive.ln = norm
    attention, ffn = getattr(block, 'attn', None), getattr(block, 'ffn', None)
    if child.endswith('1'):
        if type(attention) is MultiheadAttention and not attention.v_shortcut:
            attention.qkv = NormedLinear(progressive, attention.qkv)
            linear = 'attn.qkv'
        elif (
            type(attention) in (ShiftWindowMSA, FastShiftWindowMSA)
            and type(attention.w_msa) is WindowMSA
        ):
            become(attention, NormedShiftWindowMSA)
            attention.w_msa.qkv = NormedLinear(progressive, attention.w_msa.qkv)
            linear = 'attn.w_msa.qkv'
        else:
            linear = ''
    elif type(ffn) is FFN and ffn.num_fcs == 2:
        layer = ffn.layers[0][0]
        if type(layer) is Linear:  # mmcv's, which computes the same by a forward() of its own
            become(layer, nn.Linear)
        ffn.layers[0][0] = NormedLinear(progressive, layer)
        linear = 'ffn.layers.0.0'
    else:
        linear = ''
    setattr(block, child, nn.Identity() if linear else progressive)
    return linear


def progressive_activations(model: nn.Module) -> list[str]:
    """Let the idle channels of a model's channel-idle FFNs start with an activation, in place.

    Args:
        model (nn.Module): A model with channel-idle FFNs.

    Returns:
        list[str]: The names of the FFNs.

    Raises:
        ValueError: If there is none.
    """
    found = {name: m for name, m in model.named_modules() if type(m) is ChannelIdleFFN}
    if not found:
        raise ValueError(f'{type(model).__name__} has no channel-idle FFN')
    for ffn in found.values():
        become(ffn, ProgressiveIdleFFN)
        ffn.add_activations()
    return list(found)
