"""Check of the installation, with the commands that mend what is broken.

OpenMMLab's packages depend on each other, on PyTorch and on compiled code in ways that pip does
not know. Packages that do not fit fail late and obscurely, with ``No module named 'mmcv._ext'``
or an undefined symbol. This check names the problem at ``import repa_mm``, and what mends it.
"""

import importlib
import platform
import re
import warnings
from importlib import metadata
from importlib.util import find_spec
from typing import NoReturn

from packaging.specifiers import SpecifierSet
from packaging.version import Version

# For each module the versions that work, and the releases to recommend: OpenMMLab's last, and
# that of OneDL's fork for current versions of PyTorch.
PACKAGES = {
    'mmengine': ('>= 0.10.0, < 1.0.0', 'mmengine==0.10.7', 'onedl-mmengine==0.10.12'),
    'mmcv': ('>= 2.0.0, < 3.0.0', 'mmcv==2.1.0', 'onedl-mmcv==2.3.6'),
    'mmpretrain': ('>= 1.0.0, < 2.0.0', 'mmpretrain==1.2.0', 'onedl-mmpretrain==1.3.6'),
    'mmdet': ('>= 3.0.0, < 4.0.0', 'mmdet==3.3.0', 'onedl-mmdetection==3.5.1'),
    'mmseg': ('>= 1.0.0, < 2.0.0', 'mmsegmentation==1.2.2', 'onedl-mmsegmentation==1.4.2'),
}
REQUIRED = ('mmengine', 'mmcv', 'mmpretrain')
# The distributions that install each module.
DISTRIBUTIONS = {
    module: [pin.partition('==')[0] for pin in pins] for module, (_, *pins) in PACKAGES.items()
}
DISTRIBUTIONS['mmcv'] += ['mmcv-lite', 'mmcv-full']
# Why MMCV's compiled operators are not there, by what the error says.
OPERATORS = {
    'undefined symbol|lib(torch|c10|cudart)': 'mmcv was compiled for another PyTorch than the '
    'installed one, {torch}',
    '^ModuleNotFoundError.*mmcv-lite': 'mmcv-lite is MMCV without its compiled operators',
    '^ModuleNotFoundError': 'mmcv was installed without its compiled operators',
    '': "mmcv's compiled operators do not load",
}
PIP = 'python -m pip install'


def check_installation() -> None:
    """Check that the installed packages work together; warn where they overwrite each other.

    The check imports PyTorch, MMEngine and MMCV, and torchvision only in case of doubt.

    Raises:
        ImportError: If something cannot work. The message names what was found, and the
            commands that mend it.
    """
    torch, numpy = _load('torch').__version__, _version('numpy')
    if numpy and Version(numpy).major >= 2 and Version(torch) < Version('2.3'):
        _fail(f'PyTorch {torch} does not work with NumPy {numpy}', f'{PIP} "numpy<2"')
    if _version('torchvision'):
        _check_torchvision(Version(_version('torch')), Version(_version('torchvision')))
    for module in PACKAGES:
        _check_versions(module)
    _load('mmengine')
    _load('mmcv')
    try:
        importlib.import_module('mmcv._ext')
    except ImportError as error:
        text = f'{type(error).__name__}: {error} {" ".join(_installed("mmcv"))}'
        problem = next(why for said, why in OPERATORS.items() if re.search(said, text))
        _fail(
            f'{problem.format(torch=torch)}\n({error})',
            *_install('mmcv'),
            otherwise='\nThat needs a C++ compiler, and about ten minutes on two cores.',
        )


def _check_torchvision(torch: Version, torchvision: Version) -> None:
    """Refuse a torchvision that was made for another PyTorch."""
    # torchvision 0.15 came with torch 2.0, and the two have counted up together since.
    if torchvision.minor == torch.minor + 15 and torchvision.local == torch.local:
        return
    # Other versions and builds (torch "+cpu" and an ordinary torchvision) may work all the same.
    # Only the import tells, and it takes seconds.
    try:
        importlib.import_module('torchvision')
    except Exception as error:  # a broken package may raise anything
        _fail(
            f'torchvision {torchvision} does not fit torch {torch}\n'
            f'({type(error).__name__}: {error})',
            # pip may take the same local build again, uv does not.
            f'{PIP} uv',
            'python -m uv pip install --python "$(command -v python)" --reinstall-package '
            f'torch --reinstall-package torchvision torch=={torch.public} torchvision',
        )


def _check_versions(module: str) -> None:
    """Refuse missing modules and versions that do not work; warn of two of a kind."""
    needed, found = PACKAGES[module][0], _installed(module)
    if module in REQUIRED and find_spec(module) is None:
        _fail(f'{module} is not installed', *_install(module))
    for name, version in found.items():
        if Version(version).base_version not in SpecifierSet(needed):
            problem = f'{name} {version} does not work with repa_mm, which needs {module} {needed}'
            _fail(problem, *_install(module))
    if len(found) > 1:
        commands = dict.fromkeys([_uninstall(*found), *_install(module)])
        warnings.warn(
            f'{" and ".join(found)} are installed over each other: both contain the package '
            f'{module}.\n{_remedy(*commands)}'
        )


def _load(name: str):
    """Import a module, and name the usual reasons for which that fails."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken package may raise anything
        message = f'{type(error).__name__}: {error}'
    if re.search(r'lib(GL|gthread|glib)\b', message):
        _fail(
            f'OpenCV, which {name} imports, lacks a system library\n({message})',
            _uninstall('opencv-python', 'opencv-contrib-python', 'opencv-python-headless'),
            f'{PIP} opencv-python-headless',
            otherwise='\nOr install it; on Debian/Ubuntu: sudo apt install libgl1 libglib2.0-0',
        )
    commands = [f'{PIP} --force-reinstall {name}']
    if "'pkg_resources'" in message:
        commands = [f'{PIP} "setuptools<81"']
    elif name in PACKAGES:
        commands = _install(name, '--force-reinstall', '--no-deps')
    _fail(f'{name} cannot be imported\n({message})', *commands)


def _fail(problem: str, *commands: str, otherwise: str = '') -> NoReturn:
    """Raise ImportError with the problem, what was found, and the remedy."""
    facts = [f'Python {platform.python_version()}']
    facts += [f'{n} {_version(n)}' for n in ('torch', 'torchvision', 'numpy') if _version(n)]
    for module in PACKAGES:
        facts += [f'{n} {v}' for n, v in _installed(module).items()] or [f'no {module}']
    raise ImportError(f'{problem}\n\nFound: {", ".join(facts)}\n{_remedy(*commands)}{otherwise}')


def _install(module: str, *options: str) -> list[str]:
    """The commands that install a module; MMCV is compiled against the installed PyTorch."""
    # With none of the packages there, PyTorch decides: OpenMMLab's last releases precede 2.4.
    names = [name for other in PACKAGES for name in _installed(other)]
    onedl = any(name.startswith('onedl-') for name in names)
    if not names:
        onedl = Version(_version('torch') or '0') >= Version('2.4')
    pin = PACKAGES[module][2 if onedl else 1]
    if module != 'mmcv':
        return [' '.join([PIP, *options, pin])]
    return [
        *([_uninstall(*_installed('mmcv'))] if _installed('mmcv') else []),
        f'{PIP} "setuptools<{81 if onedl else 70}" wheel ninja',
        f'MMCV_WITH_OPS=1 {PIP} --no-build-isolation --no-cache-dir '
        f'--no-binary {pin.partition("==")[0]} {pin}',
    ]


def _installed(module: str) -> dict[str, str]:
    """The versions of the distributions that are installed for a module, by their names."""
    return {name: version for name in DISTRIBUTIONS[module] if (version := _version(name))}


def _remedy(*commands: str) -> str:
    return 'To mend it:' + ''.join(f'\n    {line}' for line in commands)


def _uninstall(*names: str) -> str:
    return f'python -m pip uninstall -y {" ".join(names)}'


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
