"""Latency of models in turn, and their parameters and multiply-adds."""

from repa_mm.measure.complexity import count
from repa_mm.measure.timing import measure

__all__ = ['count', 'measure']
