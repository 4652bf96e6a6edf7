"""Changes to the modules of an existing backbone."""

from repa_mm.models.surgery.idle import idle_channels, linear_idle_ratios
from repa_mm.models.surgery.window_attention import fast_window_attention

__all__ = ['fast_window_attention', 'idle_channels', 'linear_idle_ratios']
