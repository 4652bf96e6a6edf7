"""Channel-idle FFNs."""

from .idle import ChannelIdleFFN
from .layers import DropPath, num_active_channels
from .merged import MergedFFN
from .weights import FoldedFFN, fold, form_of, stack, unstack

__all__ = [
    'ChannelIdleFFN', 'DropPath', 'FoldedFFN', 'MergedFFN', 'fold', 'form_of',
    'num_active_channels', 'stack', 'unstack',
]  # fmt: skip
