"""Converting checkpoints from and to the layouts of others."""

from repa_mm.weights.layout_core import Conversion, mm_to_repavit, repavit_to_mm, to_mm, to_repavit
from repa_mm.weights.layout_idle_ratio import estimate_idle_ratio
from repa_mm.weights.layout_swin import to_mmpretrain

__all__ = [
    'Conversion', 'estimate_idle_ratio', 'mm_to_repavit', 'repavit_to_mm', 'to_mm', 'to_mmpretrain',
    'to_repavit',
]  # fmt: skip
