"""Where the configs lie, in a checkout and in an installed wheel."""

import difflib
import os.path as osp
from glob import glob

PACKAGE = osp.dirname(osp.abspath(__file__))


def config_root() -> str:
    """Folder of the configs: a checkout's own, or those inside the wheel.

    Raises:
        FileNotFoundError: If there is neither.
    """
    # Beside the package first: in a checkout that is where they are edited.
    # There, and only there, setup.py lies beside them too: next to an
    # installed package may lie anybody's folder `configs`.
    checkout = osp.dirname(PACKAGE)
    folders = [osp.join(PACKAGE, '.mim', 'configs')]
    if osp.isfile(osp.join(checkout, 'setup.py')):
        folders.insert(0, osp.join(checkout, 'configs'))
    for folder in folders:
        if osp.isdir(folder):
            return folder
    raise FileNotFoundError(
        f'the configs of repa_mm are missing: {" and ".join(folders)} do not '
        'exist. Install the package with `pip install -e .` in its '
        'repository, or from a wheel that `pip wheel --no-deps .` makes there'
    )


def config_path(name: str) -> str:
    """Absolute path of one of the configs that come with the package.

    A config anywhere inherits from one of them with::

        _base_ = __import__('repa_mm').config_path('retinanet_repa_swin_b.py')

    MMEngine evaluates that expression while it parses the config, so it works
    with every tool, `mim train` among them.

    Args:
        name (str): Path relative to ``configs/``, with or without '.py':
            'retinanet_repa_swin_b', 'demo/retinanet_repa_swin_nano.py'.

    Returns:
        str: The absolute path.

    Raises:
        FileNotFoundError: If there is no such config; names similar ones.
    """
    root = config_root()
    file = name if name.endswith('.py') else name + '.py'
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
        else 'there are ' + ', '.join(n for n in known if '_base_' not in n)
    )
    raise FileNotFoundError(f'repa_mm has no config {name!r}; {hint}')


def register_config_scope() -> None:
    """Let ``_base_ = 'repa_mm::folder/file.py'`` work from now on.

    MMEngine knows the packages that may stand before '::' from a fixed table,
    reads it while it parses a config, and asks for a slash in what follows.
    So this serves tools that import repa_mm first; see :func:`config_path`
    for the way that always works.
    """
    from mmengine.config import utils

    # Distribution and module differ in '-' and '_' only, which the look-up of
    # installed packages takes for the same.
    utils.MODULE2PACKAGE.setdefault('repa_mm', 'repa_mm')
