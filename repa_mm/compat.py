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


def check_installation() -> None:
    """Check that the installed packages work together; warn where they overwrite each other.

    The check imports PyTorch, MMEngine and MMCV, and torchvision only in case of doubt.

    Raises:
        ImportError: If something cannot work. The message names what was found, and the
            commands that mend it.
    """
    found = _Installation()
    torch = found.load('torch').__version__
    numpy = _version('numpy')
    if numpy and Version(numpy).major >= 2 and Version(torch) < Version('2.3'):
        found.fail(
            f'PyTorch {torch} does not work with NumPy {numpy}', 'python -m pip install "numpy<2"'
        )
    found.check_torchvision()
    found.check_versions()
    found.load('mmengine')
    found.load('mmcv')
    found.check_operators(torch)


class _Installation:
    """What is installed, and the checks of it."""

    def __init__(self) -> None:
        self.versions = {
            module: {name: version for name in names if (version := _version(name))}
            for module, names in DISTRIBUTIONS.items()
        }
        names = [name for versions in self.versions.values() for name in versions]
        # OpenMMLab's last releases precede PyTorch 2.4.
        self.onedl = Version(_version('torch') or '0') >= Version('2.4')
        if names:
            self.onedl = any(name.startswith('onedl-') for name in names)

    def fail(self, problem: str, *commands: str, otherwise: str = '') -> NoReturn:
        """Raise ImportError with the problem, what was found, and the remedy."""
        facts = [f'Python {platform.python_version()}']
        facts += [f'{n} {_version(n)}' for n in ('torch', 'torchvision', 'numpy') if _version(n)]
        for module, versions in self.versions.items():
            facts += [f'{name} {v}' for name, v in versions.items()] or [f'no {module}']
        raise ImportError(
            f'{problem}\n\nFound: {", ".join(facts)}\n{_remedy(*commands)}{otherwise}'
        )

    def install(self, module: str, *options: str) -> list[str]:
        """The commands that install a module; MMCV is compiled against the installed PyTorch."""
        pin = PACKAGES[module][2 if self.onedl else 1]
        if module != 'mmcv':
            return [' '.join(['python -m pip install', *options, pin])]
        return [
            *([_uninstall(*self.versions['mmcv'])] if self.versions['mmcv'] else []),
            f'python -m pip install "setuptools<{81 if self.onedl else 70}" wheel ninja',
            'MMCV_WITH_OPS=1 python -m pip install --no-build-isolation --no-cache-dir '
            f'--no-binary {pin.partition("==")[0]} {pin}',
        ]

    def load(self, name: str):
        """Import a module, and name the usual reasons for which that fails."""
        try:
            return importlib.import_module(name)
        except Exception as error:  # a broken package may raise anything
            message = f'{type(error).__name__}: {error}'
        if re.search(r'lib(GL|gthread|glib)\b', message):
            self.fail(
                f'OpenCV, which {name} imports, lacks a system library\n({message})',
                _uninstall('opencv-python', 'opencv-contrib-python', 'opencv-python-headless'),
                'python -m pip install opencv-python-headless',
                otherwise='\nOr install it; on Debian/Ubuntu: sudo apt install libgl1 libglib2.0-0',
            )
        commands = [f'python -m pip install --force-reinstall {name}']
        if "'pkg_resources'" in message:
            commands = ['python -m pip install "setuptools<81"']
        elif name in PACKAGES:
            commands = self.install(name, '--force-reinstall', '--no-deps')
        self.fail(f'{name} cannot be imported\n({message})', *commands)

    def check_torchvision(self) -> None:
        """Refuse a torchvision that was made for another PyTorch."""
        if not _version('torchvision'):
            return
        torch, torchvision = Version(_version('torch')), Version(_version('torchvision'))
        # torchvision 0.15 came with torch 2.0, and the two have counted up together since.
        if torchvision.minor == torch.minor + 15 and torchvision.local == torch.local:
            return
        # Other versions and builds (torch "+cpu" and an ordinary torchvision) may work all the
        # same. Only the import tells, and it takes seconds.
        try:
            importlib.import_module('torchvision')
        except Exception as error:  # a broken package may raise anything
            self.fail(
                f'torchvision {torchvision} does not fit torch {torch}\n'
                f'({type(error).__name__}: {error})',
                # pip may take the same local build again, uv does not.
                'python -m pip install uv',
                'python -m uv pip install --python "$(command -v python)" --reinstall-package '
                f'torch --reinstall-package torchvision torch=={torch.public} torchvision',
            )

    def check_versions(self) -> None:
        """Refuse missing modules and versions that do not work; warn of two of a kind."""
        for module, versions in self.versions.items():
            needed = PACKAGES[module][0]
            if module in REQUIRED and find_spec(module) is None:
                self.fail(f'{module} is not installed', *self.install(module))
            for name, version in versions.items():
                if Version(version).base_version not in SpecifierSet(needed):
                    self.fail(
                        f'{name} {version} does not work with repa_mm, which needs '
                        f'{module} {needed}',
                        *self.install(module),
                    )
            if len(versions) > 1:
                commands = dict.fromkeys([_uninstall(*versions), *self.install(module)])
                warnings.warn(
                    f'{" and ".join(versions)} are installed over each other: both contain the '
                    f'package {module}.\n{_remedy(*commands)}'
                )

    def check_operators(self, torch: str) -> None:
        """Refuse an MMCV whose compiled operators are missing or do not load."""
        try:
            importlib.import_module('mmcv._ext')
        except ImportError as error:
            problem = 'mmcv was installed without its compiled operators'
            if re.search('undefined symbol|lib(torch|c10|cudart)', str(error)):
                problem = f'mmcv was compiled for another PyTorch than the installed one, {torch}'
            elif not isinstance(error, ModuleNotFoundError):
                problem = "mmcv's compiled operators do not load"
            elif 'mmcv-lite' in self.versions['mmcv']:
                problem = 'mmcv-lite is MMCV without its compiled operators'
            self.fail(
                f'{problem}\n({error})',
                *self.install('mmcv'),
                otherwise='\nThat needs a C++ compiler, and about ten minutes on two cores.',
            )


def _remedy(*commands: str) -> str:
    return 'To mend it:' + ''.join(f'\n    {line}' for line in commands)


def _uninstall(*names: str) -> str:
    return f'python -m pip uninstall -y {" ".join(names)}'


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
