"""The registered backbones, and the structures that are put into models."""

import repa_mm.models.heads  # noqa: F401, registers
from repa_mm.models.attention import fast_window_attention, swap_attention
from repa_mm.models.builder import (
    Restructured,
    add_structures,
    build_idle_backbone,
    idle_channels,
    restructure,
)
from repa_mm.models.channel_idle import (
    RePaBackbone,
    RePaMlpMixer,
    RePaPoolFormer,
    RePaSwinTransformer,
    RePaVisionTransformer,
    build_fast_swin,
)
from repa_mm.models.deformable import swap_deformable_attention
from repa_mm.models.fusing import fuse_conv_bn
from repa_mm.models.restructured import (
    AffineRIFormer,
    ExpertsVisionTransformer,
    ParallelMAEViT,
    ParallelSwinTransformer,
    ParallelVisionTransformer,
    ProgressiveSwinTransformer,
    ProgressiveVisionTransformer,
)
from repa_mm.models.structures import STRUCTURES, Structure
from repa_mm.models.tokens import reduce_tokens

__all__ = [
    'AffineRIFormer', 'ExpertsVisionTransformer', 'ParallelMAEViT', 'ParallelSwinTransformer',
    'ParallelVisionTransformer', 'ProgressiveSwinTransformer', 'ProgressiveVisionTransformer',
    'RePaBackbone', 'RePaMlpMixer', 'RePaPoolFormer', 'RePaSwinTransformer',
    'RePaVisionTransformer', 'Restructured', 'STRUCTURES', 'Structure', 'add_structures',
    'build_fast_swin', 'build_idle_backbone', 'fast_window_attention', 'fuse_conv_bn',
    'idle_channels', 'reduce_tokens', 'restructure', 'swap_attention',
    'swap_deformable_attention',
]  # fmt: skip
