"""RePaFormers for OpenMMLab: faster transformer detectors and segmentors.

``import repa_mm`` registers backbones, heads, transforms, hooks and metrics. Where neither MMEngine
nor MMCV is installed, only the method itself, :mod:`repa_mm.reparam`, can be used.
"""

from importlib.util import find_spec

from repa_mm.paths import config_path
from repa_mm.reparam import ChannelIdleFFN, MergedFFN, reparameterize
from repa_mm.version import __version__

__all__ = [
    'ChannelIdleFFN', 'MergedFFN', '__version__', 'config_path', 'convert_pretrained',
    'fast_window_attention', 'idle_channels', 'reduce_tokens', 'reparameterize',
]  # fmt: skip

if find_spec('mmengine') or find_spec('mmcv'):
    from repa_mm.compat import check_installation

    check_installation()

    from repa_mm import engine  # noqa: F401
    from repa_mm.paths import register_config_scope
    from repa_mm.registry import register_lazily

    register_lazily()
    register_config_scope()


def __getattr__(name: str):
    # Not imported above, since repa_mm.models imports mmpretrain's models: see repa_mm.registry.
    if name in ('convert_pretrained', 'fast_window_attention', 'idle_channels', 'reduce_tokens'):
        from repa_mm import models

        return getattr(models, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
