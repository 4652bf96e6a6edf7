"""The registered backbones."""

from repa_mm.models.attention import fast_window_attention
from repa_mm.models.dino import DINO, ClassTokens, DINOHead, DINOProjection
from repa_mm.models.experts import ExpertsVisionTransformer
from repa_mm.models.heads import TokenLabelHead
from repa_mm.models.idle_backbone import build_idle_backbone
from repa_mm.models.lvvit import LVViT, RePaLVViT
from repa_mm.models.mlp_mixer import RePaMlpMixer
from repa_mm.models.parallel_swin import ParallelSwinTransformer
from repa_mm.models.parallel_vit import ParallelMAEViT, ParallelVisionTransformer
from repa_mm.models.poolformer import RePaPoolFormer
from repa_mm.models.progressive import ProgressiveSwinTransformer, ProgressiveVisionTransformer
from repa_mm.models.riformer import AffineRIFormer
from repa_mm.models.surgery.idle import idle_channels, linear_idle_ratios
from repa_mm.models.swin import FastSwinTransformer, RePaSwinTransformer
from repa_mm.models.tokens import reduce_tokens
from repa_mm.models.vit import RePaVisionTransformer

__all__ = [
    'DINO',
    'AffineRIFormer',
    'ClassTokens',
    'DINOHead',
    'DINOProjection',
    'ExpertsVisionTransformer',
    'FastSwinTransformer',
    'LVViT',
    'ParallelMAEViT',
    'ParallelSwinTransformer',
    'ParallelVisionTransformer',
    'ProgressiveSwinTransformer',
    'ProgressiveVisionTransformer',
    'RePaLVViT',
    'RePaMlpMixer',
    'RePaPoolFormer',
    'RePaSwinTransformer',
    'RePaVisionTransformer',
    'TokenLabelHead',
    'build_idle_backbone',
    'fast_window_attention',
    'idle_channels',
    'linear_idle_ratios',
    'reduce_tokens',
]
