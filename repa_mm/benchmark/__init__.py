"""Latency of models in turn, and their parameters and multiply-adds."""

from repa_mm.benchmark.complexity import count
from repa_mm.benchmark.timing import measure

__all__ = ['count', 'measure']
