"""Swin Transformer, and the two orders in which its implementations merge patches.

The original code (and with it timm and RePaFormer's authors) concatenates the four neighbours of a
patch as (0, 0), (1, 0), (0, 1), (1, 1), each with all its channels. ``nn.Unfold``, with which MMCV
merges patches, has (0, 0), (0, 1), (1, 0), (1, 1) of the first channel, then of the second, and so
on. So what reads a merged patch, ``downsample.norm`` and ``downsample.reduction``, is permuted.
"""

import math
import re

import torch
import torch.nn as nn

from repa_mm.reparam.state import below
from repa_mm.weights import without_wrappers
from repa_mm.weights.layout_family import Family, Weights, count, match, rename_all, shape_of

# From the original layout to OpenMMLab's, where a RePaFormer and a vanilla Swin agree.
_TO_MM = {
    'patch_embed.proj': 'patch_embed.projection',
    'patch_embed.norm': 'patch_embed.norm',
    'layers.#.blocks.#.norm1': 'stages.#.blocks.#.norm1',
    'layers.#.blocks.#.attn': 'stages.#.blocks.#.attn.w_msa',
    'layers.#.downsample': 'stages.#.downsample',
    'norm': 'norm3',
    'head': 'head.fc',
}
_VANILLA_TO_MM = {
    **{new: new for new in _TO_MM.values()},
    **_TO_MM,
    'norm#': 'norm#',
    'absolute_pos_embed': 'absolute_pos_embed',
    'layers.#.blocks.#.norm2': 'stages.#.blocks.#.norm2',
    'layers.#.blocks.#.mlp.fc1': 'stages.#.blocks.#.ffn.layers.0.0',
    'layers.#.blocks.#.mlp.fc2': 'stages.#.blocks.#.ffn.layers.1',
    'stages.#.blocks': 'stages.#.blocks',
}


class Swin(Family):
    """Swin Transformers."""

    backbone = 'RePaSwinTransformer'
    marker = 'relative_position_bias_table'
    configs = {size: f'repa_swin_{size[0]}_in1k.py' for size in ('tiny', 'small', 'base')}
    ffn = 'stages.#.blocks.#.ffn'
    names = {**_TO_MM, 'layers.#.blocks.#.mlp': 'stages.#.blocks.#.ffn'}
    others = {
        'norm#': 'norm#',
        'layers.#.blocks.#.norm2': 'stages.#.blocks.#.ffn.norm1',
        'layers.#.blocks.#.mlp.norm': 'stages.#.blocks.#.ffn.norm1',
        'stages.#.blocks.#.norm2': 'stages.#.blocks.#.ffn.norm1',
        'stages.#.blocks.#.ffn.layers.0.0': 'stages.#.blocks.#.ffn.fc1',
        'stages.#.blocks.#.ffn.layers.1': 'stages.#.blocks.#.ffn.fc2',
    }
    complete = True

    def rename(self, given: Weights) -> tuple[Weights, dict]:
        weights, origin = super().rename(_without_timms_stages(given))
        _permute_merged_patches(weights, to_mm=True, unless=given)
        return weights, origin

    def settings(self, weights: Weights) -> dict:
        depths, heads, windows = [], [], []
        while count(weights, f'stages.{len(depths)}.blocks.#'):
            blocks = f'stages.{len(depths)}.blocks'
            depths.append(count(weights, f'{blocks}.#'))
            table = f'{blocks}.0.attn.w_msa.relative_position_bias_table'
            length, num_heads = shape_of(weights, table, 2)
            heads.append(num_heads)
            windows.append(_window(length))
        channels, _, _, patch_size = shape_of(weights, 'patch_embed.projection.weight', 4)
        return dict(
            arch=dict(embed_dims=channels, depths=depths, num_heads=heads),
            patch_size=patch_size,
            # Those of the last stages may be smaller than what the model was given.
            window_size=max(windows, default=7),
        )

    def to_authors(self, weights: Weights, model: nn.Module, img_size: int) -> Weights:
        _permute_merged_patches(weights, to_mm=False)
        size = img_size // weights['patch_embed.projection.weight'].shape[-1]
        return _buffers(size, model.depths, model.stages[0].blocks[0].attn.window_size)


def to_mmpretrain(state_dict: Weights) -> Weights:
    """Convert a vanilla Swin of any layout to that of OpenMMLab's packages.

    MMPretrain, MMDetection and MMSegmentation name, shape and order all weights of a Swin alike:
    what is saved from the ``SwinTransformer`` of one loads into that of another as it is. Other
    layouts are those of the original repository (of its detectors and segmentors, too) and of timm.

    Args:
        state_dict (dict): Of a backbone, alone or with a classifier's head; or of a whole model,
            where the names of the backbone's weights begin with 'backbone.'.

    Returns:
        dict: The weights in OpenMMLab's layout, with the same prefix. What a whole model has
        outside of its backbone stays as it is.

    Raises:
        CheckpointError: If the backbone has a weight that no vanilla Swin has.
    """
    state_dict = without_wrappers(state_dict)
    prefix = 'backbone.' * any(key.startswith('backbone.') for key in state_dict)
    others = {key: value for key, value in state_dict.items() if not key.startswith(prefix)}
    given = below(prefix, state_dict)
    given = {key: value for key, value in given.items() if not key.endswith('attn_mask')}
    complaint = 'no vanilla Swin has these weights'
    weights, _ = rename_all(_without_timms_stages(given), _VANILLA_TO_MM, complaint)
    _permute_merged_patches(weights, to_mm=True, unless=given)
    for key in [key for key in weights if key.endswith('.relative_position_bias_table')]:
        # timm does not save it.
        index = key.replace('_bias_table', '_index')
        weights.setdefault(index, _position_index(_window(len(weights[key]))))
    return {**{prefix + key: value for key, value in weights.items()}, **others}


def _without_timms_stages(given: Weights) -> Weights:
    """Move a downsampling that begins a stage, as in timm, to the end of the stage before."""
    if any(match(key, 'layers.0.downsample') for key in given):
        return given
    stage = re.compile(r'^layers\.(\d+)(?=\.downsample\.)')
    return {stage.sub(lambda m: f'layers.{int(m[1]) - 1}', k): v for k, v in given.items()}


def _permute_merged_patches(weights: Weights, to_mm: bool, unless: Weights = {}) -> None:
    """Permute what reads merged patches to MMCV's order, or back, in place.

    Nothing is done if the names in ``unless`` are of OpenMMLab.
    """
    if any(key.startswith('stages.') for key in unless):
        return
    for key, value in weights.items():
        if re.search(r'downsample\.(norm|reduction)\.', key) and value.shape[-1:].numel() % 4 == 0:
            *rows, columns = value.shape
            if to_mm:
                value = value.view(*rows, 4, columns // 4)[..., [0, 2, 1, 3], :]
            else:
                value = value.view(*rows, columns // 4, 4)[..., [0, 2, 1, 3]]
            weights[key] = value.transpose(-2, -1).reshape(*rows, columns)


def _window(length: int) -> int:
    """Return the size of the window that has a bias table of this length."""
    return (math.isqrt(length) + 1) // 2


def _position_index(side: int) -> torch.Tensor:
    """Return the row of the bias table for every pair of places in a window."""
    y, x = torch.arange(side).repeat_interleave(side), torch.arange(side).repeat(side)
    dy, dx = (c[:, None] - c + side - 1 for c in (y, x))
    return dy * (2 * side - 1) + dx


def _buffers(size: int, depths: list[int], window: int) -> Weights:
    """Return the buffers of the original Swin, which depend on the size of its maps.

    They are the ``relative_position_index`` of every block, and the ``attn_mask`` of those whose
    windows are shifted.
    """
    buffers = {}
    for i, depth in enumerate(depths):
        side = min(window, size)
        for j in range(depth):
            name = f'layers.{i}.blocks.{j}'
            buffers[f'{name}.attn.relative_position_index'] = _position_index(side)
            if j % 2 and size > window:
                # Numbers of the parts that a shift by half a window brings together.
                line = torch.arange(size)
                line = (line >= size - side).long() + (line >= size - side // 2).long()
                part = (3 * line[:, None] + line).view(size // side, side, size // side, side)
                part = part.transpose(1, 2).reshape(-1, side**2)
                buffers[f'{name}.attn_mask'] = -100.0 * (part[:, None] != part[:, :, None])
        size //= 2
    return buffers
