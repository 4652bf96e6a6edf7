"""Paths of the configs of this package and of installed codebases."""

import os.path as osp
from importlib.util import find_spec


def config_root(package: str = 'repa_mm') -> str:
    """Return the folder of the configs of 'repa_mm', 'mmdet', 'mmseg' or 'mmpretrain'."""
    spec = find_spec(package)  # without an import: a codebase takes seconds
    if spec is None:
        raise ImportError(f'no configs of {package!r}: the package is not installed')
    folder = osp.dirname(osp.abspath(spec.origin))
    checkout = osp.dirname(folder)  # where configs/ and setup.py lie beside the package
    is_checkout = osp.isfile(osp.join(checkout, 'setup.py'))
    return osp.join(checkout if is_checkout else osp.join(folder, '.mim'), 'configs')


def config_path(name: str) -> str:
    """Return the absolute path of a config of this package or of an installed codebase.

    Any config can inherit from it, with every tool, since MMEngine evaluates the expression::

        _base_ = __import__('repa_mm').config_path('retinanet_repa_swin_b.py')

    Args:
        name (str): Path relative to ``configs/``, with or without '.py': 'retinanet_repa_swin_b',
            'demo/retinanet_repa_swin_digits.py'. For another package, its name and '::' come first:
            'mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py'.

    Raises:
        FileNotFoundError: If there is no such config.
    """
    package, _, inner = name.rpartition('::')
    file = inner if inner.endswith('.py') else inner + '.py'
    path = osp.normpath(osp.join(config_root(package or 'repa_mm'), file))
    if not osp.isfile(path):
        raise FileNotFoundError(f'{package or "repa_mm"} has no config {inner!r}: no file {path!r}')
    return path
