"""Channel-idle FFNs."""

from .folded import set_training_path_
from .idle import ChannelIdleFFN
from .layers import DropPath, build_activation, build_norm, num_active_channels
from .merged import MergedFFN, set_shortcut_
from .weights import FoldedFFN, fold, stack

__all__ = [
    'ChannelIdleFFN', 'DropPath', 'FoldedFFN', 'MergedFFN', 'build_activation', 'build_norm',
    'fold', 'num_active_channels', 'set_shortcut_', 'set_training_path_', 'stack',
]  # fmt: skip
