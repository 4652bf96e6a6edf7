"""Blocks that compute their updates for fewer tokens.

A block y = f(x) becomes y = x + R (f(M x) - M x). M averages groups of similar tokens, one token
for each group, and leaves all other tokens as they are. R gives the update of a group's token to
all tokens of the group. No weight changes, nothing is trained, and every token stays in its place,
so that necks and heads get maps of the usual shapes.

- In a Swin (:class:`ReducedSwinBlock`), windows whose tokens differ least become one token each,
  the others are computed in full. Every block decides for its own windows.
- In a plain ViT (:class:`ReducedViTLayer`), neighbouring patches that differ least become one
  token. In the attention it weighs as much as all of them.

Related are SparseViT (https://arxiv.org/abs/2303.17605: windows of little activation skip blocks),
Expedit (https://arxiv.org/abs/2210.01035: tokens are clustered, and restored before the neck) and
ToMe (https://arxiv.org/abs/2210.09461: a merged token weighs in the attention as many do).
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmpretrain.models import VisionTransformer
from mmpretrain.models.backbones.swin_transformer import SwinBlock
from mmpretrain.models.backbones.vision_transformer import TransformerEncoderLayer
from mmpretrain.models.utils.attention import MultiheadAttention

from repa_mm.faster import (
    FastShiftWindowMSA,
    Geometry,
    is_traced,
    rewrite_,
    symbolic_mul,
    traceable_partition,
)
from repa_mm.reparam import TrainingForm
from repa_mm.surgery import become_, copied

# Where the stock blocks are defined.
_SWIN_BLOCKS = (
    'mmpretrain.models.backbones.swin_transformer',
    'mmdet.models.backbones.swin',
    'mmseg.models.backbones.swin',
)
# Tokens that are processed at a time on a CPU: few enough for its caches.
_CHUNK = 2048


def _merged(total: int, keep: float) -> int:
    """Of a number of tokens or windows, how many are not kept; in integers, for tracers."""
    return total * (1000 - _per_mille(keep)) // 1000


def _per_mille(keep: float) -> int:
    return max(round(1000 * keep), 1)


class Layout(NamedTuple):
    """The n windows of a map.

    ``rows`` (n, N) are their tokens, ``padded`` (n, N) marks those that are padding, ``mask`` (n, )
    is the number of the mask of each; ``window`` and ``slot`` (H * W, ) tell where each token is.
    """

    rows: torch.Tensor
    padded: torch.Tensor
    mask: torch.Tensor
    window: torch.Tensor
    slot: torch.Tensor


def _layout(geometry: Geometry, device: torch.device) -> Layout:
    num_tokens = geometry.window**2
    rows, positions, padded, mask = traceable_partition(geometry, device)
    rows, padded = rows.view(-1, num_tokens), padded.view(-1, num_tokens)
    return Layout(rows, padded, mask, positions // num_tokens, positions % num_tokens)


@lru_cache(maxsize=32)
def _cached_layout(*args) -> Layout:
    with torch.inference_mode(False), torch.no_grad():
        return _layout(*args)


class ReducedSwinBlock(SwinBlock):
    """A Swin block for which windows of little change are one token each.

    It is an ordinary block in training mode.

    Attributes:
        keep (float): Share of the windows of each image that are processed in full.
    """

    keep = 1.0

    def forward(self, x: torch.Tensor, hw_shape: Sequence[int]) -> torch.Tensor:
        """The block.

        Args:
            x (torch.Tensor): Tokens of shape (B, H * W, C).
            hw_shape (Sequence[int]): Height H and width W of the map.

        Returns:
            torch.Tensor: Of the shape of ``x``.
        """
        attn, size = self.attn, self.attn.window_size
        if self.training or self.keep == 1:
            return super().forward(x, hw_shape)
        geometry = attn.geometry(x, hw_shape)
        shift = geometry.shift
        eager = type(x) is torch.Tensor and not is_traced()
        layout = (_cached_layout if eager else _layout)(geometry, x.device)
        rows, padded, mask = layout[:3]
        num_windows, num_tokens = mask.shape[0], size**2
        num_calm = _merged(num_windows, self.keep)
        if eager and not num_calm:
            return super().forward(x, hw_shape)
        if not isinstance(shift, int):  # known when the graph runs
            mask = symbolic_mul(mask, shift // attn.shift_size)
        if eager and not (hw_shape[0] % size or hw_shape[1] % size):
            padded = None
        batch, length, channels = x.shape
        images = torch.arange(batch, device=x.device)[:, None]

        means, change = self._look(x, rows, padded)
        order = change.argsort(1)
        calm = (order[:, :num_calm] + symbolic_mul(images, num_windows)).flatten()
        means = means.flatten(0, 1).index_select(0, calm)[:, None]
        of_calm = self._in_full(means, None, None) - means

        # The other windows, of all images, those under the same mask one after the other.
        order = order[:, num_calm:]
        others, images = order.flatten(), images.expand_as(order).flatten()
        masks = mask[others]
        if eager and shift:
            masks, by_mask = masks.sort()
            others, images = others[by_mask], images[by_mask]
        where = rows.index_select(0, others) + symbolic_mul(images, length)[:, None]
        flat, updates = x.reshape(-1, channels), []
        table = attn.w_msa.relative_position_bias_table
        known = shift if isinstance(shift, int) else attn.shift_size
        biases = attn.bias(known, table.dtype)
        for chunk, bias in self._chunks(masks, biases, eager):
            windows = flat.index_select(0, where[chunk].flatten()).view(-1, num_tokens, channels)
            is_padded = None if padded is None else padded.index_select(0, others[chunk])
            updates.append((self._in_full(windows, is_padded, bias) - windows).flatten(0, 1))

        # Where the update of each token is.
        others = others + symbolic_mul(images, num_windows)
        rank, num_others = torch.cat([others, calm]).argsort(), others.shape[0]
        in_full = (rank < num_others).long()
        start = rank + in_full * symbolic_mul(rank, num_tokens - 1)
        start = start + (1 - in_full) * symbolic_mul(
            torch.full_like(rank, num_tokens - 1), num_others
        )
        start, in_full = (v.view(batch, -1)[:, layout.window] for v in (start, in_full))
        place = (start + in_full * layout.slot).flatten()
        updates = torch.cat([*updates, of_calm.flatten(0, 1)])
        return x + updates.index_select(0, place).view(x.shape)

    def _look(
        self, x: torch.Tensor, rows: torch.Tensor, padded: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean (B, n, C) of windows of maps x, and how much their tokens differ (B, n).

        Every second token in both directions stands for all.
        """
        size = self.attn.window_size
        rows = rows.view(-1, size, size)[:, ::2, ::2].flatten(1)
        tokens = x.index_select(1, rows.flatten()).view(x.shape[0], *rows.shape, -1)
        normed = self.norm1(tokens)
        change = torch.linalg.vector_norm(normed - normed.mean(2, keepdim=True), dim=(2, 3))
        if padded is not None:  # padding is a change of its own
            change = change.masked_fill(padded.any(1), torch.inf)
        return tokens.mean(2), change

    def _in_full(
        self, x: torch.Tensor, padded: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The block on windows (n, N, C), under biases (n or 1, heads, N, N).

        Without biases, the windows are one token each, which attends to itself.
        """
        w_msa = self.attn.w_msa
        normed = self.norm1(x)
        if padded is not None:
            normed = normed.masked_fill(padded[..., None], 0)
        qkv = w_msa.qkv(normed)
        if bias is None:
            mixed = qkv[..., -x.shape[-1] :]
        else:
            q, k, v = qkv.unflatten(-1, (3, w_msa.num_heads, -1)).permute(2, 0, 3, 1, 4)
            usual = (w_msa.embed_dims // w_msa.num_heads) ** -0.5
            if w_msa.scale != usual:  # torch 2.1 exports the usual one only
                q = q * (w_msa.scale / usual)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
            mixed = mixed.transpose(1, 2).flatten(2)
        x = x + w_msa.proj(mixed)
        return self.ffn(self.norm2(x), identity=x)

    def _chunks(
        self, masks: torch.Tensor, bias: torch.Tensor, eager: bool
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Parts of windows that are sorted by their masks, with their biases."""
        if not eager or masks.device.type != 'cpu':
            yield slice(None), bias[masks] if len(bias) > 1 else bias
            return
        size = max(_CHUNK // bias.shape[-1], 1)
        counts = torch.bincount(masks).tolist() if len(bias) > 1 else [len(masks)]
        start = 0
        for mask, count in enumerate(counts):
            for i in range(start, start + count, size):
                yield slice(i, min(i + size, start + count)), bias[mask : mask + 1]
            start += count


class ReducedViTLayer(TransformerEncoderLayer):
    """A layer of a ViT for which neighbouring patches of little difference are one token.

    It is an ordinary layer in training mode.

    Attributes:
        keep (float): Share of the tokens that are left of the patches of each image.
        num_extra_tokens (int): Class tokens and the like before the patches, which never merge.
    """

    keep = 1.0
    num_extra_tokens = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer, for tokens of shape (B, L, C)."""
        if self.training or self.keep == 1:
            return super().forward(x)
        tokens, place, sizes = merge_neighbours(x, self.keep, self.num_extra_tokens)
        y = tokens + self._attend(self.ln1(tokens), sizes)
        update = self.ffn(self.ln2(y), identity=y) - tokens
        return x + restore(update, place)

    def _attend(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """The attention, in which each token weighs as many as the tokens it stands for."""
        attn = self.attn
        qkv = attn.qkv(x).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mask = sizes.to(qkv.dtype).log()[None, None, None]
        x = attn.scaled_dot_product_attention(*qkv, attn_mask=mask)
        return attn.gamma1(attn.proj(x.transpose(1, 2).flatten(2)))


def merge_neighbours(
    x: torch.Tensor, keep: float, num_extra_tokens: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Replace groups of similar neighbours by their means.

    A group is a patch and the next one (of a ``keep`` below 1/2 the next two, three, …), in the
    order of the tokens.

    Args:
        x (torch.Tensor): Tokens of shape (B, L, C).
        keep (float): Share of the patches that are left.
        num_extra_tokens (int): Tokens before the patches, which are left as they are.

    Returns:
        tuple: The tokens that are left (B, n, C), the place of each token among them (B, L), and of
        how many tokens each is the mean (n, ).
    """
    batch, length, channels = x.shape
    size = max(math.ceil(1000 / _per_mille(keep)), 2)
    number = length - num_extra_tokens
    num_groups, num_merged = number // size, _merged(number, keep) // (size - 1)
    end = num_extra_tokens + num_groups * size
    groups = x[:, num_extra_tokens:end].reshape(batch, -1, size, channels)
    units = F.normalize(groups, dim=-1)
    order = (units[:, :, 1:] - units[:, :, :1]).square().sum((2, 3)).argsort(1)
    images = torch.arange(batch, device=x.device)[:, None]
    index, groups = order + symbolic_mul(images, num_groups), groups.flatten(0, 1)
    merged = groups.index_select(0, index[:, :num_merged].flatten()).mean(1)
    others = groups.index_select(0, index[:, num_merged:].flatten())
    merged, others = (t.reshape(batch, -1, channels) for t in (merged, others))
    tail = x[:, end:]
    tokens = torch.cat([x[:, :num_extra_tokens], others, merged, tail], 1)

    rank, slot = order.argsort(1)[..., None], torch.arange(size, device=x.device)
    first = num_extra_tokens + others.shape[1]
    place = torch.where(
        rank < num_merged, rank + first, (rank - num_merged) * size + num_extra_tokens + slot
    )
    index = torch.arange(length, device=x.device).expand(batch, -1)
    last = index[:, end:] - (length - tokens.shape[1])
    place = torch.cat([index[:, :num_extra_tokens], place.flatten(1), last], 1)
    ones = torch.ones_like(tokens[0, :, 0])
    sizes = torch.cat(
        [ones[:first], size * ones[first : first + num_merged], ones[: tail.shape[1]]]
    )
    return tokens, place, sizes


def restore(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Return for each token what is at its place in x (B, n, C): (B, L, C)."""
    images = torch.arange(place.shape[0], device=place.device)
    index = place + symbolic_mul(images, x.shape[1])[:, None]
    return x.flatten(0, 1).index_select(0, index.flatten()).view(*place.shape, -1)


def reduce_tokens(model: nn.Module, keep: float | Sequence[float] = 0.7) -> nn.Module:
    """Return a copy of a model that :func:`reduce_tokens_` has changed.

    Examples:
        >>> fast = reduce_tokens(repa_mm.reparameterize(model), keep=0.7)
    """
    return reduce_tokens_(copied(model), keep)


def reduce_tokens_(model: nn.Module, keep: float | Sequence[float] = 0.7) -> nn.Module:
    """Let the blocks of a trained model compute their updates for fewer tokens, in place.

    No weight changes and the state dict stays the same, but outputs do: the smaller ``keep``, the
    faster and the coarser. Blocks with merged FFNs gain most; merging afterwards, with
    :func:`~repa_mm.reparameterize`, is exact, too. In training mode nothing is reduced.
    The docstring of :mod:`projects.token_reduction.tokens` says what is computed.

    Args:
        model (nn.Module): A model with the stock Swin of MMPretrain, MMDetection or MMSegmentation,
            or with MMPretrain's ``VisionTransformer``. A window attention becomes the one of
            :func:`~repa_mm.faster.fast_window_attention_`.
        keep (float | Sequence[float]): Share of what is computed in full, from 0.1 to 1: of
            a Swin the windows of each image, of a ViT the patches. One for all blocks, or one for
            each stage of a Swin. 1 leaves blocks as they are, and gives reduced ones their full
            computation back. Defaults to 0.7.

    Returns:
        nn.Module: The same model.

    Raises:
        ValueError: If ``keep`` is not such a share, there are not as many as stages, or no block of
            the model can be reduced.
    """
    for share in keep if isinstance(keep, (list, tuple)) else [keep]:
        # Below, the patches that are left over from the last group would be most of what is kept.
        if not 0.1 <= share <= 1:
            raise ValueError(
                f'keep is the share of what is computed in full, from 0.1 to 1, but is {share!r}'
            )
    rewrite_(model, 'window attention')
    stages = _reducible(model)
    if not stages:
        raise ValueError(
            f'no block of this {type(model).__name__} can be reduced: known are the blocks of the '
            "stock Swin of MMPretrain, MMDetection and MMSegmentation and of MMPretrain's "
            'VisionTransformer'
        )
    shares = keep if isinstance(keep, (list, tuple)) else [keep] * len(stages)
    if len(shares) != len(stages):
        raise ValueError(
            f'keep has {len(shares)} entries, but the model has {len(stages)} stages: give one '
            'number, or one for each stage'
        )
    for share, blocks in zip(shares, stages):
        for block, kind in blocks:
            become_(block, kind)
            block.keep = share
    for vit in model.modules():
        if isinstance(vit, VisionTransformer):
            for layer in vit.layers:
                layer.num_extra_tokens = vit.num_extra_tokens
    return model


def _reducible(model: nn.Module) -> list[list[tuple[nn.Module, type]]]:
    """The blocks that can be reduced, with what they become, stage by stage; a ViT is one stage."""
    stages: dict[str, list] = {}
    for name, block in model.named_modules():
        # By exact type, as a subclass may do something else.
        kind, where = type(block).__name__, type(block).__module__
        if kind == 'SwinBlock' and where in _SWIN_BLOCKS or type(block) is ReducedSwinBlock:
            w_msa = block.attn.w_msa
            # A norm inside of the attention would see what is padding behind the norm.
            has_stock_forward = not isinstance(w_msa, TrainingForm) and type(w_msa.qkv) is nn.Linear
            if has_stock_forward and type(block.attn) is FastShiftWindowMSA:
                stages.setdefault(name.rpartition('.')[0], []).append((block, ReducedSwinBlock))
        elif isinstance(block, VisionTransformer):
            for layer in block.layers:
                is_known = type(layer) in (TransformerEncoderLayer, ReducedViTLayer)
                if (
                    is_known
                    and type(layer.attn) is MultiheadAttention
                    and not layer.attn.v_shortcut
                ):
                    stages.setdefault(name, []).append((layer, ReducedViTLayer))
    return list(stages.values())
