"""The registered backbones."""

from .attention import fast_window_attention
from .idle import idle_channels, linear_idle_ratios
from .lvvit import LVViT, RePaLVViT
from .mlp_mixer import RePaMlpMixer
from .poolformer import RePaPoolFormer
from .swin import FastSwinTransformer, RePaSwinTransformer
from .token_label import TokenLabelHead
from .vit import RePaVisionTransformer

__all__ = [
    'FastSwinTransformer',
    'LVViT',
    'RePaLVViT',
    'RePaMlpMixer',
    'RePaPoolFormer',
    'RePaSwinTransformer',
    'RePaVisionTransformer',
    'TokenLabelHead',
    'fast_window_attention',
    'idle_channels',
    'linear_idle_ratios',
]
