"""The registered backbones."""
from .attention import fast_window_attention
from .idle import idle_channels, linear_idle_ratios
from .swin import FastSwinTransformer, RePaSwinTransformer

__all__ = [
    'FastSwinTransformer', 'RePaSwinTransformer', 'fast_window_attention',
    'idle_channels', 'linear_idle_ratios'
]
