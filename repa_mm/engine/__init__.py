"""What MMEngine's Runner calls."""

from repa_mm.engine.metrics import DumpSegResults
from repa_mm.engine.reparameterize import ReparameterizeHook
from repa_mm.engine.safe_checkpoint import SafeCheckpointHook

__all__ = ['DumpSegResults', 'ReparameterizeHook', 'SafeCheckpointHook']
