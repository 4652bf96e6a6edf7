"""What MMEngine's Runner calls."""
from .hooks import ReparameterizeHook

__all__ = ['ReparameterizeHook']
