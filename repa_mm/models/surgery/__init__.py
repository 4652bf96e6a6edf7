"""Changes to the modules of an existing backbone."""

from repa_mm.models.surgery.idle import (
    find_blocks,
    idle_channels,
    idle_ffn,
    linear_idle_ratios,
    parts_of,
    put,
)

__all__ = [
    'find_blocks', 'idle_channels', 'idle_ffn', 'linear_idle_ratios',
    'parts_of', 'put',
]  # fmt: skip
