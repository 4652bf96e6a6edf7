"""Channel-idle FFNs."""

from .idle import ChannelIdleFFN
from .layers import DropPath, num_active_channels
from .merged import MergedFFN
from .weights import FoldedFFN, fold

__all__ = ['ChannelIdleFFN', 'DropPath', 'FoldedFFN', 'MergedFFN', 'fold', 'num_active_channels']
