"""The wheel, the editable install, and configs that inherit from either."""

import email
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import repa_mm

ROOT = Path(repa_mm.__file__).resolve().parents[1]
# As pip and other front ends build a wheel or an editable install (PEP 517 and 660).
BUILD = 'from setuptools import build_meta; build_meta.build_{}({!r})'


def run(command, cwd, **env):
    """Run a command; its output. A failure shows what it printed."""
    done = subprocess.run(
        command, cwd=cwd, env=dict(os.environ, **env), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shipped(folder):
    """Files that MIM looks for, relative to `folder`."""
    return {
        path.relative_to(folder).as_posix()
        for name in ('configs', 'tools')
        for path in (folder / name).rglob('*')
        if path.is_file() and '__pycache__' not in path.parts
    } | {'model-index.yml'}


def copy_sources(target):
    """A copy of the repository, so that nothing is built inside of it."""
    target.mkdir()
    for name in ('repa_mm', 'configs', 'tools'):
        shutil.copytree(
            ROOT / name, target / name, ignore=shutil.ignore_patterns('__pycache__', '.mim')
        )
    files = 'setup.py', 'pyproject.toml', 'MANIFEST.in', 'LICENSE', 'README.md', 'model-index.yml'
    for name in files:
        shutil.copy(str(ROOT / name), str(target / name))
    return target


@pytest.fixture(scope='session')
def wheel(tmp_path_factory):
    """The wheel, built from sources in which there was a build before."""
    folder = tmp_path_factory.mktemp('wheel')
    sources = copy_sources(folder / 'sources')
    stale = sources / 'build' / 'lib' / 'repa_mm' / 'removed.py'
    stale.parent.mkdir(parents=True)
    stale.touch()
    (sources / 'configs' / '__pycache__').mkdir()
    (sources / 'configs' / '__pycache__' / 'x.pyc').touch()
    run([sys.executable, '-c', BUILD.format('wheel', str(folder))], sources)
    (found,) = folder.glob('*.whl')
    return found


@pytest.fixture(scope='session')
def installed(wheel, tmp_path_factory):
    """A folder into which the wheel is installed."""
    target = tmp_path_factory.mktemp('installed')
    zipfile.ZipFile(wheel).extractall(target)
    return target


def test_what_the_wheel_holds(wheel):
    """The package with what MIM looks for, and no requirement of an mm* package."""
    assert wheel.name == f'repa_mm-{repa_mm.__version__}-py3-none-any.whl'
    archive = zipfile.ZipFile(wheel)
    names, info = archive.namelist(), f'repa_mm-{repa_mm.__version__}.dist-info'
    assert {name.split('/')[0] for name in names} == {'repa_mm', info}
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / 'repa_mm').rglob('*')
        if path.suffix in ('.py', '.typed') and '.mim' not in path.parts
    }
    for_mim = {f'repa_mm/.mim/{name}' for name in shipped(ROOT)}
    for_mim.remove('repa_mm/.mim/tools/demo.py')  # without demo/ it could not run
    assert {name for name in names if name.startswith('repa_mm/')} == sources | for_mim
    meta = email.message_from_bytes(archive.read(f'{info}/METADATA'))
    required = sorted(r for r in meta.get_all('Requires-Dist') if 'extra ==' not in r)
    assert required == ['numpy', 'torch>=2.1']
    assert meta['Requires-Python'] == '>=3.10'


def test_configs_inherit_from_the_installed_wheel(installed, tmp_path):
    """Parsed by MMEngine alone, as MIM and other projects' tools do."""
    base = "__import__('repa_mm').config_path('retinanet_repa_swin_b.py')"
    change = '\nmodel = dict(bbox_head=dict(num_classes=3))\n'
    (tmp_path / 'single.py').write_text(f'_base_ = {base}{change}')
    (tmp_path / 'other.py').write_text('mine = 1\n')
    (tmp_path / 'listed.py').write_text(f"_base_ = ['other.py', {base}]{change}")
    script = (
        'import json, sys\n'
        'sys.modules["mmcv"] = None  # whose import takes longer than all that follows\n'
        'from mmengine import Config\n'
        'assert "repa_mm" not in sys.modules\n'
        'configs = [Config.fromfile(f"{n}.py") for n in ("single", "listed")]\n'
        'import repa_mm\n'
        'path = repa_mm.config_path("retinanet_repa_swin_b")\n'
        'other = Config.fromfile(repa_mm.config_path("repa_vit_l_in1k"))\n'
        'heads = [c.model.bbox_head.num_classes for c in configs]\n'
        'backbones = [c.model.backbone.type for c in configs]\n'
        'size = other.train_dataloader.batch_size\n'
        'print(json.dumps([repa_mm.__file__, path, heads, backbones, size, configs[1].mine]))\n'
    )
    printed = run([sys.executable, '-c', script], tmp_path, PYTHONPATH=str(installed))
    file, path, *found = json.loads(printed.splitlines()[-1])
    assert Path(file).parent == installed / 'repa_mm'
    assert Path(path) == installed / 'repa_mm/.mim/configs/retinanet_repa_swin_b.py'
    assert found == [[3, 3], ['RePaSwinTransformer'] * 2, 128, 1]


def test_an_editable_install_links_what_mim_looks_for(tmp_path):
    sources = copy_sources(tmp_path / 'sources')
    # Left by an older version: a copy where a link belongs.
    (sources / 'repa_mm' / '.mim' / 'configs').mkdir(parents=True)
    run([sys.executable, '-c', BUILD.format('editable', str(tmp_path))], sources)
    linked = sources / 'repa_mm' / '.mim'
    assert sorted(p.name for p in linked.iterdir()) == ['configs', 'model-index.yml', 'tools']
    assert (linked / 'configs').is_symlink()
    assert shipped(linked.resolve()) == shipped(sources)


def test_config_path_in_a_checkout():
    for name in ('retinanet_repa_swin_b.py', 'retinanet_repa_swin_b'):
        assert repa_mm.config_path(name) == str(ROOT / 'configs' / 'retinanet_repa_swin_b.py')
    assert Path(repa_mm.config_path('demo/retinanet_swin_digits')).parent == ROOT / 'configs/demo'
    with pytest.raises(FileNotFoundError, match="repa_mm has no config 'swin'"):
        repa_mm.config_path('swin')
