"""The one command: how much faster a model can be on this machine, and what it costs."""

from repa_mm.search.options import Options
from repa_mm.search.rows import Row
from repa_mm.search.search import speed_up

__all__ = ['Options', 'Row', 'speed_up']
