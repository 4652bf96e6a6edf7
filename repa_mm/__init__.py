"""RePaFormers for OpenMMLab: faster transformer detectors and segmentors.

``import repa_mm`` registers the backbones and the hook. Without MMEngine and
MMCV installed, only the method itself, :mod:`repa_mm.reparam`, is available.
"""

from importlib.util import find_spec

from .reparam import ChannelIdleFFN, MergedFFN, reparameterize
from .utils.paths import config_path
from .version import __version__

__all__ = [
    'ChannelIdleFFN',
    'MergedFFN',
    '__version__',
    'config_path',
    'fast_window_attention',
    'idle_channels',
    'reparameterize',
]

if find_spec('mmengine') or find_spec('mmcv'):
    from .compat import check_installation

    check_installation()

    from . import engine  # noqa: F401
    from .registry import register_lazily
    from .utils.paths import register_config_scope

    register_lazily()
    register_config_scope()


def __getattr__(name: str):
    # Importing it imports mmpretrain's models, see repa_mm.registry.
    if name in ('fast_window_attention', 'idle_channels'):
        from . import models

        return getattr(models, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
