"""A check of the installation that says how to mend what is broken.

OpenMMLab's packages depend on each other, on PyTorch and on compiled code in
ways that pip does not know. What does not fit shows late and darkly, as
``No module named 'mmcv._ext'`` or an undefined symbol; here it shows at
``import repa_mm``, together with the commands that mend it.
"""

import glob
import importlib
import os.path as osp
import platform
import re
import warnings
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import NamedTuple, NoReturn


class Package(NamedTuple):
    """A module of the MM family, and the distributions that install it.

    OpenMMLab's comes first, then OneDL's fork for current versions of PyTorch,
    then predecessors. ``pins`` are the releases to recommend of the first two.
    """

    distributions: tuple[str, ...]
    minimum: str
    below: str
    pins: tuple[str, str]
    required: bool = True


OPENMMLAB, ONEDL = 0, 1
PACKAGES = {
    'mmengine': Package(
        ('mmengine', 'onedl-mmengine'),
        '0.10.0',
        '1.0.0',
        ('mmengine==0.10.7', 'onedl-mmengine==0.10.12'),
    ),
    'mmcv': Package(
        ('mmcv', 'onedl-mmcv', 'mmcv-lite', 'mmcv-full'),
        '2.0.0',
        '3.0.0',
        ('mmcv==2.1.0', 'onedl-mmcv==2.3.6'),
    ),
    'mmpretrain': Package(
        ('mmpretrain', 'onedl-mmpretrain'),
        '1.0.0',
        '2.0.0',
        ('mmpretrain==1.2.0', 'onedl-mmpretrain==1.3.6'),
    ),
    'mmdet': Package(
        ('mmdet', 'onedl-mmdetection'),
        '3.0.0',
        '4.0.0',
        ('mmdet==3.3.0', 'onedl-mmdetection==3.5.1'),
        required=False,
    ),
    'mmseg': Package(
        ('mmsegmentation', 'onedl-mmsegmentation'),
        '1.0.0',
        '2.0.0',
        ('mmsegmentation==1.2.2', 'onedl-mmsegmentation==1.4.2'),
        required=False,
    ),
}
TORCH_MINIMUM = '2.0'
# OpenMMLab's own distributions assert, when imported, that MMCV is older.
MMCV_BELOW = {'mmdet': '2.2.0', 'mmseg': '2.2.0'}


def check_installation() -> None:
    """Check that the packages found work together.

    Looks at the versions of PyTorch, MMEngine, MMCV, MMPretrain and, where
    installed, MMDetection and MMSegmentation (importing neither these two nor
    MMPretrain), at MMCV's compiled operators, and at whether torchvision and
    NumPy fit PyTorch. Warns of packages that overwrite or refuse each other.

    Raises:
        ImportError: If something cannot work. The message names what was
            found and the commands that mend it.
    """
    found = _Installation()
    torch = found.load('torch')
    if _release(torch.__version__) < _release(TORCH_MINIMUM):
        found.fail(
            f'PyTorch {torch.__version__} is too old: {TORCH_MINIMUM} or newer is needed',
            ['python -m pip install --upgrade torch torchvision', *found.compile_mmcv()],
        )
    found.check_numpy(torch.__version__)
    found.check_torchvision(torch.__version__)
    for module in PACKAGES:
        found.check_version(module)
    found.load('mmengine')
    found.check_operators(found.load('mmcv'), torch.__version__)
    found.warn_of_conflicts()


class _Installation:
    """What is installed, and the checks of it."""

    def __init__(self) -> None:
        self.versions: dict[str, dict[str, str]] = {}
        for module, package in PACKAGES.items():
            versions = {d: _version(d) for d in package.distributions}
            self.versions[module] = {d: v for d, v in versions.items() if v}
        names = [name for found in self.versions.values() for name in found]
        self.family = (
            ONEDL
            if any(name.startswith('onedl-') for name in names)
            else OPENMMLAB
            if names
            # OpenMMLab's last releases precede these versions of PyTorch.
            else ONEDL
            if _release(_version('torch') or '') >= (2, 4)
            else OPENMMLAB
        )

    def fail(self, problem: str, commands: Sequence[str], otherwise: str = '') -> NoReturn:
        """Raise ImportError with the problem, the facts and the remedy."""
        facts = [f'Python {platform.python_version()}']
        facts += [
            f'{name} {_version(name)}'
            for name in ('torch', 'torchvision', 'numpy')
            if _version(name)
        ]
        for module, versions in self.versions.items():
            facts += [f'{name} {version}' for name, version in versions.items()]
            if not versions:
                facts.append(f'no {module}')
        raise ImportError(
            f'{problem}\n\nFound: {", ".join(facts)}\n'
            f'{_remedy(commands)}' + (f'\n{otherwise}' if otherwise else '')
        )

    def load(self, name: str):
        """Import a module; the usual reasons for which that fails."""
        try:
            return importlib.import_module(name)
        # A broken package may raise anything while it is imported.
        except Exception as error:  # noqa: B902
            message = f'{type(error).__name__}: {error}'
        if re.search(r'lib(GL|gthread|glib)\b', message):
            self.fail(
                f'OpenCV, which {name} imports, lacks a system library\n({message})',
                [
                    'python -m pip uninstall -y opencv-python '
                    'opencv-contrib-python opencv-python-headless',
                    'python -m pip install opencv-python-headless',
                ],
                'Or install the library; on Debian/Ubuntu: sudo apt install libgl1 libglib2.0-0',
            )
        if "'pkg_resources'" in message:
            self.fail(
                f'{name} imports pkg_resources, which current versions of '
                f'setuptools no longer have\n({message})',
                ['python -m pip install "setuptools<81"'],
            )
        if name == 'mmcv':
            commands = self.compile_mmcv()
        elif name in PACKAGES:
            commands = [
                'python -m pip install --force-reinstall --no-deps '
                f'{PACKAGES[name].pins[self.family]}'
            ]
        else:
            commands = [f'python -m pip install --force-reinstall {name}']
        self.fail(f'{name} cannot be imported\n({message})', commands)

    def compile_mmcv(self) -> Sequence[str]:
        """The commands that compile MMCV against the installed PyTorch."""
        pin = PACKAGES['mmcv'].pins[self.family]
        setuptools = 'setuptools<81' if self.family == ONEDL else 'setuptools<70'
        commands = [
            f'python -m pip install "{setuptools}" wheel ninja',
            'MMCV_WITH_OPS=1 python -m pip install --no-build-isolation '
            f'--no-cache-dir --no-binary {pin.partition("==")[0]} {pin}',
        ]
        if self.versions['mmcv']:
            commands.insert(0, 'python -m pip uninstall -y ' + ' '.join(self.versions['mmcv']))
        return commands

    def check_version(self, module: str) -> None:
        """A required module that is missing, any that is out of range."""
        package = PACKAGES[module]
        commands = (
            self.compile_mmcv()
            if module == 'mmcv'
            else [f'python -m pip install {package.pins[self.family]}']
        )
        if find_spec(module) is None:
            if package.required:
                self.fail(f'{module} is not installed', commands)
            return
        for name, version in self.versions[module].items():
            if not (_release(package.minimum) <= _release(version) < _release(package.below)):
                self.fail(
                    f'{name} {version} does not work with repa_mm, which '
                    f'needs {module} >= {package.minimum}, < {package.below}',
                    commands,
                )

    def check_operators(self, mmcv, torch_version: str) -> None:
        """MMCV's compiled operators that are missing or do not load."""
        try:
            importlib.import_module('mmcv._ext')
            return
        except ImportError as error:
            message = str(error)
            missing = isinstance(error, ModuleNotFoundError)
        binaries = [
            osp.basename(path)
            for path in glob.glob(osp.join(glob.escape(osp.dirname(mmcv.__file__)), '_ext*'))
            if path.endswith(('.so', '.pyd'))
        ]
        if 'undefined symbol' in message or re.search('lib(torch|c10|cudart)', message):
            problem = (
                f'mmcv was compiled for another PyTorch than the installed one, {torch_version}'
            )
        elif missing and binaries:
            problem = (
                f'mmcv was compiled for another Python than this one, '
                f'{platform.python_version()}: it has {binaries[0]}'
            )
        elif missing and 'mmcv-lite' in self.versions['mmcv']:
            problem = 'mmcv-lite is MMCV without its compiled operators'
        elif missing:
            problem = 'mmcv was installed without its compiled operators'
        else:
            problem = "mmcv's compiled operators do not load"
        self.fail(
            f'{problem}\n({message})',
            self.compile_mmcv(),
            'The compilation needs a C++ compiler and takes about ten minutes on two cores.',
        )

    def check_numpy(self, torch_version: str) -> None:
        """A PyTorch that was compiled for NumPy 1, with NumPy 2."""
        version = _version('numpy') or ''
        if _release(version) >= (2,) and _release(torch_version) < (2, 3):
            self.fail(
                f'PyTorch {torch_version} does not work with NumPy {version}',
                ['python -m pip install "numpy<2"'],
            )

    def check_torchvision(self, torch_version: str) -> None:
        """A torchvision that is missing or made for another PyTorch."""
        version = _version('torchvision')
        # torch.__version__ may name a build (+cu121) that the distribution does
        # not, and torchvision is compared by its distribution.
        torch_version = _version('torch') or torch_version
        torch_pin, _, torch_build = torch_version.partition('+')
        wanted = _matching_torchvision(torch_version)
        pin = f'torchvision=={wanted}.*' if wanted else 'torchvision'
        if find_spec('torchvision') is None:
            self.fail(
                'torchvision is not installed',
                [f'python -m pip install "{pin}" torch=={torch_pin}'],
            )
        if version is None or wanted is None:
            return
        # Versions that match are enough, but not across builds (torch
        # "2.13.0+cpu" and an ordinary torchvision). Whether the rest works
        # only an import tells, which takes seconds: in case of doubt only.
        if version.startswith(f'{wanted}.') and version.partition('+')[2] == torch_build:
            return
        try:
            importlib.import_module('torchvision')
        except Exception as error:  # noqa: B902, see `load`
            self.fail(
                f'torchvision {version} does not fit torch {torch_version}\n'
                f'({type(error).__name__}: {error})',
                [
                    # pip may take the same local build again, uv does not.
                    'python -m pip install uv',
                    'python -m uv pip install --python "$(command -v python)"'
                    f' --reinstall-package torch --reinstall-package '
                    f'torchvision torch=={torch_pin} "{pin}"',
                ],
            )

    def warn_of_conflicts(self) -> None:
        """Distributions that overwrite or refuse each other."""
        for module, versions in self.versions.items():
            if len(versions) > 1:
                names = ' '.join(versions)
                commands = (
                    self.compile_mmcv()
                    if module == 'mmcv'
                    else [
                        f'python -m pip uninstall -y {names}',
                        f'python -m pip install {PACKAGES[module].pins[self.family]}',
                    ]
                )
                warnings.warn(
                    f'{" and ".join(versions)} are installed over each other: '
                    f'both contain the package {module}.\n{_remedy(commands)}'
                )
        for module, below in MMCV_BELOW.items():
            name = PACKAGES[module].distributions[OPENMMLAB]
            refused = [
                f'{mmcv} {version}'
                for mmcv, version in self.versions['mmcv'].items()
                if _release(version) >= _release(below)
            ]
            if name in self.versions[module] and refused:
                warnings.warn(
                    f'{name} {self.versions[module][name]} cannot be imported '
                    f'with {refused[0]}: it asks for MMCV < {below}.\n'
                    + _remedy(
                        [
                            f'python -m pip uninstall -y {name}',
                            f'python -m pip install {PACKAGES[module].pins[ONEDL]}',
                        ]
                    )
                )


def _remedy(commands: Sequence[str]) -> str:
    return 'To mend it:\n' + '\n'.join('    ' + line for line in commands)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """'2.1rc4+cu118' -> (2, 1, 0); () if there is no number."""
    numbers = re.match(r'\d+(\.\d+)*', version)
    if not numbers:
        return ()
    release = tuple(map(int, numbers[0].split('.')))
    return release + (0,) * (3 - len(release))


def _matching_torchvision(torch_version: str) -> str | None:
    """The torchvision made for a release of PyTorch, 'major.minor'."""
    release = _release(torch_version)
    # 2.0 came with 0.15, and the two have counted up together since.
    return f'0.{release[1] + 15}' if release[:1] == (2,) else None
