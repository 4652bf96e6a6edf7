"""ViT and DeiT."""

import math

import torch
import torch.nn as nn

from repa_mm.models import linear_idle_ratios
from repa_mm.weights.layout_family import Family, Weights, count, image_settings, shape_of


class ViT(Family):
    """Vision Transformers with a class token."""

    backbone = 'RePaVisionTransformer'
    marker = 'cls_token'
    configs = {
        'deit-tiny': 'repa_deit_t_in1k.py',
        'deit-small': 'repa_deit_s_in1k.py',
        'deit-base': 'repa_deit_b_in1k.py',
        'large': 'repa_vit_l_in1k.py',
        'huge': 'repa_vit_h_in1k.py',
    }
    ffn = 'layers.#.ffn'
    names = {
        'cls_token': 'cls_token',
        'pos_embed': 'pos_embed',
        'norm_pre': 'pre_norm',
        'patch_embed.proj': 'patch_embed.projection',
        'blocks.#.attn.norm': 'layers.#.ln1',
        'blocks.#.attn.qkv': 'layers.#.attn.qkv',
        'blocks.#.attn.proj': 'layers.#.attn.proj',
        'blocks.#.mlp': 'layers.#.ffn',
        'norm': 'ln1',
        'head': 'head.fc',
    }
    others = {
        'blocks.#.norm1': 'layers.#.ln1',
        'blocks.#.norm2': 'layers.#.ffn.norm1',
        'blocks.#.mlp.norm': 'layers.#.ffn.norm1',
        'layers.#.ln2': 'layers.#.ffn.norm1',
        'layers.#.ffn.layers.0.0': 'layers.#.ffn.fc1',
        'layers.#.ffn.layers.1': 'layers.#.ffn.fc2',
        'head.layers.head': 'head.fc',
    }
    left_out = ('dist_token', 'head_dist', 'head.layers.head_dist')  # of distilled models
    stem_stride = 1  # of what comes before the patches are taken

    def rename(self, given: Weights) -> tuple[Weights, dict]:
        weights, origin = super().rename(given)
        if 'dist_token' in given:
            shape_of(weights, 'pos_embed', 3)
            position = weights['pos_embed']
            weights['pos_embed'] = torch.cat([position[:, :1], position[:, 2:]], 1)
        return weights, origin

    def settings(self, weights: Weights) -> dict:
        patch_size = shape_of(weights, 'patch_embed.projection.weight', 4)[-1]
        _, length, channels = shape_of(weights, 'pos_embed', 3)
        arch = dict(embed_dims=channels, num_layers=count(weights, 'layers.#'))
        return dict(arch=arch, **image_settings(length - 1, self.stem_stride * patch_size))

    def to_ours(self, weights: Weights, model: nn.Module) -> None:
        bias = 'patch_embed.projection.bias'
        if bias in weights and model.patch_embed.projection.bias is None:
            # Every patch has its own position, to which the bias may be added just as well.
            position = weights['pos_embed'].clone()
            position[:, 1:] += weights.pop(bias)
            weights['pos_embed'] = position

    def active_channels(self, ratio: float, hidden: list[int], args: dict) -> list[int]:
        ratios = [ratio] * len(hidden)
        if str(args.get('heuristic')).strip().lower() == 'linear':
            ratios = linear_idle_ratios(ratio, len(hidden))
        return [math.ceil(h * (1 - r)) for h, r in zip(hidden, ratios)]
