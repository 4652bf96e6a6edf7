"""What MMEngine's Runner calls."""
from .hooks import ReparameterizeHook
from .metrics import DumpSegResults

__all__ = ['DumpSegResults', 'ReparameterizeHook']
