"""The registered backbones."""
from .idle import idle_channels, linear_idle_ratios
from .lvvit import LVViT, RePaLVViT
from .mlp_mixer import RePaMlpMixer
from .poolformer import RePaPoolFormer
from .swin import RePaSwinTransformer
from .token_label import TokenLabelHead
from .vit import RePaVisionTransformer

__all__ = [
    'LVViT', 'RePaLVViT', 'RePaMlpMixer', 'RePaPoolFormer',
    'RePaSwinTransformer', 'RePaVisionTransformer', 'TokenLabelHead',
    'idle_channels', 'linear_idle_ratios'
]
