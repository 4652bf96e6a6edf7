"""Every broken installation gets a message that says what to do."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from repa_mm import compat

ONEDL = {
    'torch': '2.13.0',
    'torchvision': '0.28.0',
    'numpy': '2.4.6',
    'onedl-mmengine': '0.10.12',
    'onedl-mmcv': '2.3.6',
    'onedl-mmpretrain': '1.3.6',
    'onedl-mmdetection': '3.5.1',
    'onedl-mmsegmentation': '1.4.2',
}
OPENMMLAB = {
    'torch': '2.1.2',
    'torchvision': '0.16.2',
    'numpy': '1.26.4',
    'mmengine': '0.10.7',
    'mmcv': '2.1.0',
    'mmpretrain': '1.2.0',
    'mmdet': '3.3.0',
    'mmsegmentation': '1.2.2',
}


class World:
    """An installation that exists only for `check_installation`."""

    def __init__(self, versions, folder):
        self.versions = dict(versions)
        self.folder = folder
        self.broken = {}  # module: what importing it raises
        self.reported = {}  # module: its __version__, if it is another one
        self.imported = []

    def version(self, distribution):
        return self.versions.get(distribution)

    def find_spec(self, module):
        names = compat.DISTRIBUTIONS.get(module, [module])
        return any(name in self.versions for name in names) or None

    def import_module(self, module):
        self.imported.append(module)
        if module in self.broken:
            raise self.broken[module]
        return SimpleNamespace(
            __version__=self.reported.get(module, self.versions.get(module)),
            __file__=str(self.folder / '__init__.py'),
        )


@pytest.fixture(params=['onedl', 'openmmlab'])
def any_world(request, monkeypatch, tmp_path):
    return _make(ONEDL if request.param == 'onedl' else OPENMMLAB, monkeypatch, tmp_path)


@pytest.fixture
def world(monkeypatch, tmp_path):
    return _make(ONEDL, monkeypatch, tmp_path)


@pytest.fixture
def openmmlab(monkeypatch, tmp_path):
    return _make(OPENMMLAB, monkeypatch, tmp_path)


def _make(versions, monkeypatch, folder):
    world = World(versions, folder)
    monkeypatch.setattr(compat, '_version', world.version)
    monkeypatch.setattr(compat, 'find_spec', world.find_spec)
    monkeypatch.setattr(compat, 'importlib', SimpleNamespace(import_module=world.import_module))
    return world


def failure():
    """The message of a failing check; its form is the same for all."""
    with pytest.raises(ImportError) as info:
        compat.check_installation()
    message = str(info.value)
    assert '\nFound: Python ' in message
    assert 'To mend it:\n    python -m pip ' in message
    # The user's own index settings are to be used.
    assert '://' not in message and '-index' not in message
    return message


def test_this_installation_is_sound():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        compat.check_installation()


def test_sound_installations_pass(any_world, recwarn):
    compat.check_installation()
    assert not recwarn.list
    heavy = {'mmdet', 'mmseg', 'mmpretrain', 'torchvision'}
    assert not heavy & set(any_world.imported)
    assert 'mmcv._ext' in any_world.imported


def test_mmdet_and_mmseg_are_optional(world, recwarn):
    del world.versions['onedl-mmdetection']
    del world.versions['onedl-mmsegmentation']
    compat.check_installation()
    assert not recwarn.list


@pytest.mark.parametrize('module', ['mmengine', 'mmcv', 'mmpretrain'])
def test_a_required_package_is_missing(any_world, module):
    for name in compat.DISTRIBUTIONS[module]:
        any_world.versions.pop(name, None)
    message = failure()
    assert message.startswith(f'{module} is not installed')
    assert f'no {module}' in message
    onedl = 'onedl-mmdetection' in any_world.versions
    assert f' {compat.PACKAGES[module][2 if onedl else 1]}' in message


@pytest.mark.parametrize(
    'torch, pin', [('2.13.0', 'onedl-mmengine=='), ('2.1.2', 'install mmengine==')]
)
def test_the_stack_advised_fits_torch(monkeypatch, tmp_path, torch, pin):
    """With no MM package there, its version decides which to install."""
    _make(
        {'torch': torch, 'torchvision': {'2.13.0': '0.28.0', '2.1.2': '0.16.2'}[torch]},
        monkeypatch,
        tmp_path,
    )
    assert pin in failure()


@pytest.mark.parametrize(
    'name, version, needs',
    [
        ('onedl-mmengine', '0.9.1', 'mmengine >= 0.10.0'),
        ('onedl-mmcv', '1.7.2', 'mmcv >= 2.0.0'),
        ('onedl-mmcv', '3.0.0', 'mmcv >= 2.0.0, < 3.0.0'),
        ('onedl-mmpretrain', '0.25.0', 'mmpretrain >= 1.0.0'),
        ('onedl-mmdetection', '2.28.2', 'mmdet >= 3.0.0'),
        ('onedl-mmsegmentation', '0.30.0', 'mmseg >= 1.0.0'),
    ],
)
def test_a_version_is_out_of_range(world, name, version, needs):
    world.versions[name] = version
    message = failure()
    assert message.startswith(f'{name} {version} does not work')
    assert needs in message


def test_release_candidates_and_short_versions_are_in_range(world):
    world.versions['onedl-mmcv'] = '2.0'
    compat.check_installation()
    world.versions['onedl-mmcv'] = '2.0.0rc4'
    compat.check_installation()


def test_mmcv_full_is_replaced(openmmlab):
    del openmmlab.versions['mmcv']
    openmmlab.versions['mmcv-full'] = '1.7.2'
    message = failure()
    assert 'mmcv-full 1.7.2 does not work' in message
    assert 'uninstall -y mmcv-full\n' in message
    assert '--no-build-isolation' in message and 'mmcv==2.1.0' in message


def test_torch_cannot_be_imported(world):
    world.broken['torch'] = OSError('libcudnn.so.9: cannot open shared object')
    message = failure()
    assert message.startswith('torch cannot be imported\n(OSError: libcudnn')
    assert '--force-reinstall torch' in message


def test_numpy_is_too_new_for_torch(openmmlab):
    openmmlab.versions['numpy'] = '2.0.1'
    message = failure()
    assert 'PyTorch 2.1.2 does not work with NumPy 2.0.1' in message
    assert 'install "numpy<2"' in message


@pytest.mark.parametrize('torch, torchvision', [('2.13.0+cpu', '0.28.0'), ('2.13.0', '0.27.1')])
def test_torchvision_of_another_torch(world, torch, torchvision):
    world.versions.update(torch=torch, torchvision=torchvision)
    # It works all the same: nothing to complain of.
    compat.check_installation()
    assert 'torchvision' in world.imported
    world.broken['torchvision'] = RuntimeError('operator torchvision::nms does not exist')
    message = failure()
    assert message.startswith(f'torchvision {torchvision} does not fit torch {torch}\n')
    assert 'torchvision::nms' in message
    assert 'torch==2.13.0 torchvision' in message


def test_torch_says_more_than_its_distribution(openmmlab):
    """torch 2.1.2 calls itself '2.1.2+cu121': no reason for any doubt."""
    openmmlab.reported['torch'] = '2.1.2+cu121'
    compat.check_installation()
    assert 'torchvision' not in openmmlab.imported


def test_mmcv_without_operators(any_world):
    any_world.broken['mmcv._ext'] = ModuleNotFoundError("No module named 'mmcv._ext'")
    message = failure()
    assert message.startswith('mmcv was installed without its compiled oper')
    name = 'onedl-mmcv' if 'onedl-mmcv' in any_world.versions else 'mmcv'
    uninstall, tools, build = message.partition('mend it:\n')[2].splitlines()[:3]
    assert uninstall.endswith(f'uninstall -y {name}')
    assert 'ninja' in tools and 'setuptools<' in tools
    assert build.split()[0] == 'MMCV_WITH_OPS=1'
    assert '--no-build-isolation' in build and f'--no-binary {name} ' in build


def test_mmcv_lite(openmmlab):
    del openmmlab.versions['mmcv']
    openmmlab.versions['mmcv-lite'] = '2.1.0'
    openmmlab.broken['mmcv._ext'] = ModuleNotFoundError("No module named 'mmcv._ext'")
    message = failure()
    assert message.startswith('mmcv-lite is MMCV without its compiled oper')
    assert 'uninstall -y mmcv-lite' in message


@pytest.mark.parametrize(
    'error',
    [
        '/x/mmcv/_ext.so: undefined symbol: _ZN3c1017RegisterOperatorsD1Ev',
        'libtorch_cuda_cu.so: cannot open shared object file',
        'libcudart.so.11.0: cannot open shared object file',
    ],
)
def test_mmcv_of_another_torch(world, error):
    world.broken['mmcv._ext'] = ImportError(error)
    message = failure()
    assert message.startswith(
        'mmcv was compiled for another PyTorch than the installed one, 2.13.0'
    )
    assert error in message


def test_operators_that_fail_otherwise(world):
    world.broken['mmcv._ext'] = ImportError('version GLIBCXX_3.4.32 not found')
    message = failure()
    assert message.startswith("mmcv's compiled operators do not load")
    assert 'GLIBCXX_3.4.32' in message


@pytest.mark.parametrize('library', ['libGL.so.1', 'libgthread-2.0.so.0'])
def test_opencv_without_its_libraries(world, library):
    world.broken['mmcv'] = ImportError(f'{library}: cannot open shared object file: No such file')
    message = failure()
    assert message.startswith('OpenCV, which mmcv imports, lacks')
    assert library in message
    assert 'install opencv-python-headless' in message and 'libgl1' in message


def test_setuptools_without_pkg_resources(world):
    world.broken['mmengine'] = ModuleNotFoundError("No module named 'pkg_resources'")
    assert 'install "setuptools<81"' in failure()


@pytest.mark.parametrize(
    'module, command',
    [('mmengine', '--force-reinstall --no-deps onedl-mmengine=='), ('mmcv', 'onedl-mmcv==')],
)
def test_a_package_that_raises_on_import(world, module, command):
    world.broken[module] = SyntaxError('invalid syntax')
    message = failure()
    assert f'{module} cannot be imported\n(SyntaxError: invalid syntax' in message
    assert command in message


def test_warning_of_two_mmcv(world):
    world.versions['mmcv'] = '2.1.0'
    with pytest.warns(UserWarning, match='over each other') as record:
        compat.check_installation()
    message = str(record[0].message)
    assert message.startswith('mmcv and onedl-mmcv are installed over')
    assert 'uninstall -y mmcv onedl-mmcv' in message


def test_warning_of_two_mmpretrain(world):
    world.versions['mmpretrain'] = '1.2.0'
    with pytest.warns(UserWarning, match='package mmpretrain') as record:
        compat.check_installation()
    assert 'uninstall -y mmpretrain onedl-mmpretrain' in str(record[0].message)


def test_importing_repa_mm_leaves_slow_packages_alone():
    names = ('torchvision', 'mmdet', 'mmseg', 'mmpretrain')
    output = subprocess.check_output(
        [
            sys.executable,
            '-c',
            f'import sys, repa_mm; print("imported", [n for n in {names} if n in sys.modules])',
        ],
        cwd=str(Path(compat.__file__).parents[1]),
        universal_newlines=True,
    )
    assert 'imported []' in output.splitlines()


def test_the_message_reaches_the_user(tmp_path):
    """`import repa_mm` where something like mmcv-lite shadows mmcv."""
    (tmp_path / 'mmcv').mkdir()
    (tmp_path / 'mmcv' / '__init__.py').write_text("__version__ = '2.1.0'\n")
    info = tmp_path / 'mmcv_lite-2.1.0.dist-info'
    info.mkdir()
    (info / 'METADATA').write_text('Metadata-Version: 2.1\nName: mmcv-lite\nVersion: 2.1.0\n')
    root = Path(compat.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, '-c', 'import repa_mm'],
        cwd=tmp_path,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), str(root)])),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode != 0
    assert 'mmcv-lite is MMCV without its compiled operators' in done.stderr
    assert "No module named 'mmcv._ext'" in done.stderr
    assert '--no-build-isolation' in done.stderr
