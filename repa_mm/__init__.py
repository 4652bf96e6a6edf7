"""RePaFormers for OpenMMLab: faster transformer detectors and segmentors.

``import repa_mm`` registers backbones, heads, transforms, hooks and metrics. Where MMEngine is not
installed, only the method itself, :mod:`repa_mm.reparam`, can be used.
"""

from importlib import import_module
from importlib.util import find_spec

from repa_mm.reparam import ChannelIdleFFN, MergedFFN, reparameterize
from repa_mm.version import __version__

__all__ = ['ChannelIdleFFN', 'MergedFFN', '__version__', 'reparameterize']

if find_spec('mmengine'):
    from mmengine.utils import digit_version

    try:
        import_module('mmcv._ext')
    except ImportError as error:
        raise ImportError(
            f"mmcv's compiled operators do not load ({error}): compile mmcv against the installed "
            'PyTorch, see docs/install.md'
        ) from error
    for _name, _low, _high in (
        ('mmengine', '0.10.0', '1.0.0'),
        ('mmcv', '2.0.0', '3.0.0'),
        ('mmpretrain', '1.0.0', '2.0.0'),
    ):
        _found = import_module(_name).__version__
        assert digit_version(_low) <= digit_version(_found) < digit_version(_high), (
            f'{_name}=={_found} is used but incompatible. Please install {_name}>={_low}, <{_high}.'
        )

    from repa_mm import datasets, engine  # noqa: F401
    from repa_mm.convert import convert_pretrained
    from repa_mm.faster import fast_window_attention
    from repa_mm.models import idle_channels, reduce_tokens
    from repa_mm.paths import config_path

    __all__ += [
        'config_path', 'convert_pretrained', 'fast_window_attention', 'idle_channels',
        'reduce_tokens',
    ]  # fmt: skip
