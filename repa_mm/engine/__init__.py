"""What MMEngine's Runner calls."""

from .checkpoint import SafeCheckpointHook
from .hooks import ReparameterizeHook
from .metrics import DumpSegResults

__all__ = ['DumpSegResults', 'ReparameterizeHook', 'SafeCheckpointHook']
