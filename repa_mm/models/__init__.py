"""The registered backbones."""
from .idle import idle_channels, linear_idle_ratios
from .mlp_mixer import RePaMlpMixer
from .poolformer import RePaPoolFormer
from .swin import RePaSwinTransformer
from .vit import RePaVisionTransformer

__all__ = [
    'RePaMlpMixer', 'RePaPoolFormer', 'RePaSwinTransformer',
    'RePaVisionTransformer', 'idle_channels', 'linear_idle_ratios'
]
