"""RePaFormers for OpenMMLab: faster transformer detectors and segmentors.

``import repa_mm`` registers models and hooks; conversion, export and search are imported on first
use. The method itself, :mod:`repa_mm.reparam`, needs only PyTorch: where MMEngine, MMCV or
MMPretrain are missing or do not load, nothing is registered, and the method still works.
"""

import warnings
from importlib import import_module
from importlib.util import find_spec

from repa_mm.io.paths import config_path
from repa_mm.reparam import ChannelIdleFFN, MergedFFN, reparameterize, reparameterize_
from repa_mm.version import __version__

__all__ = [
    'ChannelIdleFFN', 'MergedFFN', '__version__', 'config_path', 'reparameterize',
    'reparameterize_',
]  # fmt: skip

#: Public names that need MMEngine, MMCV and MMPretrain, and the packages that have them.
_ON_FIRST_USE = dict(
    ExportedModel='repa_mm.export',
    convert_pretrained='repa_mm.convert',
    fast_window_attention_='repa_mm.faster',
    speed_up='repa_mm.search',
)
_reason, _error = 'MMEngine is not installed', None


def _exported_model(**kwargs):
    """Build a :class:`~repa_mm.export.ExportedModel` from a config."""
    from repa_mm.export import ExportedModel

    return ExportedModel(**kwargs)


if find_spec('mmengine'):
    try:
        from mmengine.registry import MODELS

        from repa_mm import hooks, models  # noqa: F401
    except Exception as error:  # imports fail in many ways, and the method needs none of them
        _reason, _error = f'{type(error).__name__}: {error}', error
        warnings.warn(
            f'repa_mm cannot register its models and hooks ({_reason}): see docs/install.md'
        )
    else:
        _reason = ''
        MODELS.register_module('ExportedModel', module=_exported_model)
        __all__ += _ON_FIRST_USE


def __getattr__(name: str):
    if name not in _ON_FIRST_USE:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    if _reason:
        raise ImportError(
            f'repa_mm.{name} needs MMEngine, MMCV and MMPretrain ({_reason}): see docs/install.md'
        ) from _error
    return getattr(import_module(_ON_FIRST_USE[name]), name)
