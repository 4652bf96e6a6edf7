"""RePaFormers for OpenMMLab: faster transformer detectors and segmentors.

``import repa_mm`` registers backbones, heads, transforms, hooks and metrics. Where MMEngine is not
installed, only the method itself, :mod:`repa_mm.reparam`, can be used.
"""

from importlib.util import find_spec

from repa_mm.reparam import ChannelIdleFFN, MergedFFN, reparameterize
from repa_mm.version import __version__

__all__ = ['ChannelIdleFFN', 'MergedFFN', '__version__', 'reparameterize']

if find_spec('mmengine'):
    from repa_mm import datasets, engine  # noqa: F401
    from repa_mm.fit import convert_pretrained
    from repa_mm.models import fast_window_attention, idle_channels, reduce_tokens
    from repa_mm.paths import config_path

    __all__ += [
        'config_path', 'convert_pretrained', 'fast_window_attention', 'idle_channels',
        'reduce_tokens',
    ]  # fmt: skip
