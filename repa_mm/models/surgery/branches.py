"""Putting parallel branches into transformers, and pretrained layers into the branches."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn as nn
from mmpretrain.models.utils.attention import MultiheadAttention, ShiftWindowMSA, WindowMSA

from repa_mm.models.attention import FastShiftWindowMSA
from repa_mm.models.surgery.idle import parts_of
from repa_mm.reparam import (
    ChannelIdleFFN,
    CheckpointError,
    ParallelAttention,
    ParallelFFN,
    ParallelIdleFFN,
    TrainingForm,
)


class Place(NamedTuple):
    """Names in an ordinary block of what becomes one parallel form."""

    form: str
    norm: str
    entry: str
    exit: str
    scale: str


VIT = (
    Place('attn', 'ln1', 'attn.qkv', 'attn.proj', 'attn.gamma1.weight'),
    Place('ffn', 'ln2', 'ffn.layers.0.0', 'ffn.layers.1', 'ffn.gamma2.weight'),
)
SWIN = (
    Place('attn.w_msa', 'norm1', 'attn.w_msa.qkv', 'attn.w_msa.proj', ''),
    Place('ffn', 'norm2', 'ffn.layers.0.0', 'ffn.layers.1', 'ffn.gamma2.weight'),
)


class ParallelShiftWindowMSA(FastShiftWindowMSA):
    """Shifted window attention in branches; the fast one as soon as they are merged."""

    def forward(self, query: torch.Tensor, hw_shape: Sequence[int]) -> torch.Tensor:
        """As :meth:`FastShiftWindowMSA.forward`."""
        if isinstance(self.w_msa, TrainingForm):
            return ShiftWindowMSA.forward(self, query, hw_shape)
        return super().forward(query, hw_shape)


def parallel_attention(attention: nn.Module, num_branches: int) -> ParallelAttention:
    """Branches in place of an attention of mmpretrain.

    Args:
        attention (nn.Module): A ``MultiheadAttention`` or a ``WindowMSA``.
        num_branches (int): Number of branches.

    Raises:
        ValueError: If the attention is of another kind.
    """
    if type(attention) is WindowMSA:  # around windows, ShiftWindowMSA drops paths
        own = dict(window_size=attention.window_size, qk_scale=attention.scale)
        own.update(attn_drop=attention.attn_drop.p)
    elif type(attention) is MultiheadAttention and not attention.v_shortcut:
        drop_path = getattr(attention.out_drop, 'drop_prob', 0.0)
        own = dict(attn_drop=attention.attn_drop, drop_path=drop_path)
    else:
        raise ValueError(f'a {type(attention).__name__} is no attention that can have branches')
    own.update(qkv_bias=attention.qkv.bias is not None, proj_drop=attention.proj_drop.p)
    dims = attention.embed_dims, attention.num_heads
    parallel = ParallelAttention(*dims, num_branches, **own)
    _take_layer_scale(parallel, getattr(getattr(attention, 'gamma1', None), 'weight', None))
    return parallel


def parallel_ffn(block: nn.Module, num_branches: int, norm_cfg: dict) -> TrainingForm:
    """Branches in place of the FFN of a block, ordinary or channel-idle.

    Args:
        block (nn.Module): The block, one of those that
            :func:`~repa_mm.models.surgery.idle.find_blocks` finds.
        num_branches (int): Number of branches.
        norm_cfg (dict): Norm of channel-idle FFNs.

    Raises:
        ValueError: If the FFN is of another kind.
    """
    ffn = block.ffn
    if type(ffn) is ChannelIdleFFN:
        if norm_cfg.get('type') == 'keep':
            norm_cfg = dict(norm_cfg, type='LN')
        dims = ffn.embed_dims, ffn.feedforward_channels
        ratio = ffn.num_idle / ffn.feedforward_channels
        drops = dict(drop_path=ffn.dropout_layer.drop_prob, drop_rate=ffn.drop.p)
        parallel = ParallelIdleFFN(
            *dims, num_branches, ratio, act_cfg=ffn.act, norm_cfg=norm_cfg, **drops
        )
        parallel.norm1, parallel.layer_scale = ffn.norm1, ffn.layer_scale
        return parallel
    parts = parts_of(block)
    dims = ffn.embed_dims, ffn.feedforward_channels
    drops = dict(drop_path=parts.drop_path, drop_rate=parts.drop)
    parallel = ParallelFFN(*dims, num_branches, parts.act, **drops)
    _take_layer_scale(parallel, parts.scale)
    return parallel


def _take_layer_scale(parallel: nn.Module, scale: torch.Tensor | None) -> None:
    if scale is not None:
        parallel.layer_scale = nn.Parameter(scale.detach().clone())


def fill_block(
    state_dict: dict, block: str, model: nn.Module, layers: Sequence[str], places: Sequence[Place]
) -> None:
    """Lay pretrained layers side by side in the branches of a block, in place.

    Each branch then computes from the block's input what its layer computes from the same input.
    The norm that the branches share neither scales nor shifts: weight and bias of each layer's norm
    go into the matrix behind that norm.

    Args:
        state_dict (dict): Of an ordinary transformer of mmpretrain. The layers' weights are
            replaced by those of the block.
        block (str): Name of the block in the state dict.
        model (nn.Module): The block. FFNs that are channel-idle are left out.
        layers (Sequence[str]): Names of the layers, one for each branch.
        places (Sequence[Place]): ``VIT`` or ``SWIN``.

    Raises:
        CheckpointError: If the layers are of unequal width, or their weights incomplete.
    """

    def take(name):
        found = [state_dict.pop(f'{layer}.{name}', None) for layer in layers]
        shapes = [None if value is None else tuple(value.shape) for value in found]
        if len(set(shapes)) > 1:
            raise CheckpointError(
                f'the layers {", ".join(layers)} cannot be branches of one block, since they are '
                f'of unequal width: {name} has the shapes {", ".join(map(str, shapes))}'
            )
        return None if found[0] is None else [value.double() for value in found]

    new = {}
    for place in places:
        form = model.get_submodule(place.form)
        if isinstance(form, ChannelIdleFFN):
            continue
        into, out = f'{place.form}.{form.entry}.branches', f'{place.form}.{form.exit}'
        gammas, betas = take(f'{place.norm}.weight'), take(f'{place.norm}.bias')
        weights, biases = take(f'{place.entry}.weight'), take(f'{place.entry}.bias')
        out_weights, out_biases = take(f'{place.exit}.weight'), take(f'{place.exit}.bias')
        if any(found is None for found in (gammas, betas, weights, out_weights, out_biases)):
            raise CheckpointError(
                f'the checkpoint lacks weights of {place.norm}, {place.entry} or {place.exit} in '
                f'{layers[0]!r}, or has some without a bias'
            )
        new[f'{place.norm}.weight'] = torch.ones_like(gammas[0])
        new[f'{place.norm}.bias'] = torch.zeros_like(betas[0])
        for b, weight in enumerate(weights):
            new[f'{into}.{b}.weight'] = weight * gammas[b]
            shift = weight @ betas[b]
            if biases is not None:
                new[f'{into}.{b}.bias'] = biases[b] + shift
            elif shift.any():
                raise CheckpointError(
                    f'{place.norm} of {layers[b]!r} shifts its output, and {place.entry} has no '
                    'bias for the shift to go into (qkv_bias=False)'
                )
        scales = take(place.scale) or [torch.ones_like(out_biases[0])] * len(layers)
        common = torch.ones_like(scales[0])
        if form.layer_scale is not None:
            common = new[f'{place.form}.layer_scale'] = torch.stack(scales).abs().amax(0)
        scales = [torch.where(common > 0, scale / common, 0.0) for scale in scales]
        new[f'{out}.weight'] = torch.cat([s[:, None] * w for s, w in zip(scales, out_weights)], 1)
        new[f'{out}.bias'] = sum(s * b for s, b in zip(scales, out_biases))
        tables = take(f'{place.form}.relative_position_bias_table')
        if tables is not None:
            take(f'{place.form}.relative_position_index')
            new[f'{place.form}.relative_position_bias_table'] = torch.cat(tables, 1)
    for key, own in model.state_dict().items():
        if key in new:
            state_dict[f'{block}.{key}'] = new[key].to(own.dtype)
        elif key.endswith(('.lam', '.relative_position_index')):
            state_dict[f'{block}.{key}'] = own.clone()


def number_of_layers(state_dict: dict, prefix: str, places: Sequence[Place]) -> int:
    """How many ordinary layers, named by numbers after a prefix, a state dict has."""
    pattern = re.compile(rf'{re.escape(prefix)}\d+\.{re.escape(places[0].entry)}\.weight')
    return sum(bool(pattern.fullmatch(key)) for key in state_dict)
