"""Where configs lie: those of this package, and those of installed codebases."""

import difflib
import os.path as osp
from glob import glob
from importlib.util import find_spec

PACKAGE = osp.dirname(osp.abspath(__file__))


def config_root(package: str = PACKAGE) -> str:
    """Folder of the configs of a package: a checkout's own, or those inside the wheel.

    Args:
        package (str): The folder of the package. Defaults to that of repa_mm.

    Raises:
        FileNotFoundError: If there is neither.
    """
    # Beside the package first: in a checkout that is where they are edited. There, and only there,
    # setup.py lies beside them too: next to an installed package may lie anybody's `configs`.
    checkout = osp.dirname(package)
    folders = [osp.join(package, '.mim', 'configs')]
    if osp.isfile(osp.join(checkout, 'setup.py')):
        folders.insert(0, osp.join(checkout, 'configs'))
    for folder in folders:
        if osp.isdir(folder):
            return folder
    raise FileNotFoundError(
        f'the configs of {osp.basename(package)} are missing: {" and ".join(folders)} do not '
        'exist. Install the package with `pip install -e .` in its '
        'repository, or from a wheel that `pip wheel --no-deps .` makes there'
    )


def config_path(name: str) -> str:
    """Absolute path of a config that comes with this package, or with an installed codebase.

    A config anywhere inherits from it with::

        _base_ = __import__('repa_mm').config_path('retinanet_repa_swin_b.py')

    MMEngine evaluates that expression while it parses the config, so it works with every tool,
    ``mim train`` among them.

    Args:
        name (str): Path relative to ``configs/``, with or without '.py': 'retinanet_repa_swin_b',
            'demo/retinanet_repa_swin_digits.py'. Of another package after its name and '::', as
            in 'mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py'.

    Returns:
        str: The absolute path.

    Raises:
        FileNotFoundError: If there is no such config; names similar ones.
    """
    package, _, inner = name.rpartition('::')
    root = config_root()
    if package:
        found = find_spec(package)
        if found is None or not found.origin:
            raise FileNotFoundError(f'no config {name!r}: {package!r} is not installed')
        root = config_root(osp.dirname(found.origin))
    file = inner if inner.endswith('.py') else inner + '.py'
    path = osp.normpath(osp.join(root, file))
    if path.startswith(root + osp.sep) and osp.isfile(path):
        return path
    known = sorted(
        osp.relpath(found, root).replace(osp.sep, '/')
        for found in glob(osp.join(root, '**', '*.py'), recursive=True)
    )
    similar = difflib.get_close_matches(file, known, n=5, cutoff=0.5)
    similar += [n for n in known if osp.basename(n) == osp.basename(file) and n not in similar]
    hint = (
        'did you mean ' + ' or '.join(map(repr, similar))
        if similar
        else 'there are ' + ', '.join([n for n in known if '_base_' not in n][:100])
    )
    raise FileNotFoundError(f'{package or "repa_mm"} has no config {inner!r}; {hint}')


def register_config_scope() -> None:
    """Let ``_base_ = 'repa_mm::folder/file.py'`` work from now on.

    MMEngine knows the packages that may stand before '::' from a fixed table, reads it while it
    parses a config, and asks for a slash in what follows. So this serves tools that import repa_mm
    first; see :func:`config_path` for the way that always works.
    """
    from mmengine.config import utils

    # Distribution and module differ in '-' and '_' only, which the look-up of installed packages
    # takes for the same.
    utils.MODULE2PACKAGE.setdefault('repa_mm', 'repa_mm')
