"""Channel-idle FFNs."""

from .folded import set_training_path
from .idle import ChannelIdleFFN
from .layers import DropPath, build_activation, build_norm, num_active_channels
from .merged import MergedFFN, set_shortcut
from .weights import FoldedFFN, fold, stack

__all__ = [
    'ChannelIdleFFN', 'DropPath', 'FoldedFFN', 'MergedFFN', 'build_activation', 'build_norm',
    'fold', 'num_active_channels', 'set_shortcut', 'set_training_path', 'stack',
]  # fmt: skip
