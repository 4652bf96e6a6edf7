"""LV-ViT."""

import torch.nn as nn

from repa_mm.weights.layout_family import Weights, match, shape_of
from repa_mm.weights.layout_vit import ViT

_STEM = {
    f'patch_embed.{kind}{i + 1}': f'patch_embed.stem.{3 * i + j}'
    for i in range(3)
    for j, kind in enumerate(('conv', 'bn'))
}


class LVViT(ViT):
    """Vision Transformers with convolutions before the patches, and scaled residuals."""

    backbone = 'RePaLVViT'
    marker = 'patch_embed.conv1|patch_embed.stem'
    configs = dict(s='repa_lvvit_s_in1k.py', m='repa_lvvit_m_in1k.py')
    names = {
        **{old: new for old, new in ViT.names.items() if old != 'blocks.#.attn.norm'},
        **_STEM,
        'blocks.#.norm1': 'layers.#.ln1',
        'aux_head': 'head.aux_fc',
    }
    others = {
        'blocks.#.attn.norm': 'layers.#.ln1',
        'blocks.#.norm2': 'layers.#.ffn.norm1',
        'blocks.#.mlp.norm': 'layers.#.ffn.norm1',
    }
    stem_stride = 2

    def settings(self, weights: Weights) -> dict:
        stem = shape_of(weights, 'patch_embed.stem.0.weight', 4)
        return dict(super().settings(weights), stem_channels=stem[0])

    def to_ours(self, weights: Weights, model: nn.Module) -> None:
        # The FFNs of the authors' code see the tokens divided by the residual scale.
        self._scale_inputs(weights, model.residual_scale)

    def to_authors(self, weights: Weights, model: nn.Module, img_size: int) -> Weights:
        self._scale_inputs(weights, 1 / model.residual_scale)
        return {}

    def _scale_inputs(self, weights: Weights, scale: float) -> None:
        """Scale the tokens of which the FFNs' first statistics are, in place."""
        for key, value in weights.items():
            if match(key, f'{self.ffn}.norm1.running_mean'):
                weights[key] = value * scale
            elif match(key, f'{self.ffn}.norm1.running_var'):
                weights[key] = value * scale**2
