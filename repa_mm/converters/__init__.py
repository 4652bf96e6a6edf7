"""Converting checkpoints."""

from repa_mm.converters.convert import (
    Conversion,
    estimate_idle_ratio,
    mm_to_repavit,
    repavit_to_mm,
    to_mm,
    to_repavit,
)

__all__ = [
    'Conversion',
    'estimate_idle_ratio',
    'mm_to_repavit',
    'repavit_to_mm',
    'to_mm',
    'to_repavit',
]
