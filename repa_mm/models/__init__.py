"""The registered backbones."""
from .idle import idle_channels, linear_idle_ratios
from .swin import RePaSwinTransformer

__all__ = ['RePaSwinTransformer', 'idle_channels', 'linear_idle_ratios']
