"""The set-up: its pins, what it does again, and what it says when it fails."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import repa_mm
from repa_mm import compat

ROOT = Path(repa_mm.__file__).resolve().parents[1]
SCRIPT = ROOT / 'requirements' / 'setup_env.py'

pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason='needs the repository')


@pytest.fixture
def setup_env():
    spec = importlib.util.spec_from_file_location('setup_env', str(SCRIPT))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Commands(list):
    """Stands for `run`: notes the commands, and answers in their place."""

    def __init__(self, environment):
        super().__init__()
        self.environment = environment
        self.fails = None  # a part of the command that is to fail

    def __call__(self, command, log, cwd=None, **env):
        line = ' '.join(map(str, command))
        self.append(line)
        if self.fails and self.fails in line:
            raise subprocess.CalledProcessError(1, command, f'{self.fails}: error: it fails\n')
        if ' venv ' in line and 'uv/bin/uv' in line:
            self.environment.python.parent.mkdir()
            self.environment.python.touch()
            self.environment.python.with_name('pip').touch()
        if ' download ' in line:
            source = self.environment.folder / 'x' / 'mmcv'
            source.mkdir(parents=True)
            shutil.make_archive(str(self.environment.folder / 'mmcv'), 'gztar', source.parent)
            shutil.rmtree(source.parent)
        if 'pip wheel ' in line:
            (self.environment.folder / 'unpacked' / f'{WHEEL}.whl').write_text('compiled')
        return 'torch 2.13.0\n'


WHEEL = 'onedl_mmcv-2.3.6-cp311-cp311-linux_x86_64'


@pytest.fixture
def environment(setup_env, tmp_path, monkeypatch):
    """An environment with all but the commands."""
    for name in ('MMCV_WHEEL', 'FORCE_CUDA', 'CXX'):
        monkeypatch.delenv(name, raising=False)
    environment = setup_env.Environment('onedl', tmp_path / 'env')
    monkeypatch.setattr(setup_env, 'run', Commands(environment))
    monkeypatch.setattr(setup_env, 'check_disk', lambda *paths: None)
    monkeypatch.setattr(environment, 'try_compiler', lambda: None)
    environment.try_compiler.__name__ = 'try_compiler'
    return environment


@pytest.fixture
def commands(setup_env, environment):
    return setup_env.run


# ------------------------------------------------------------------- the pins


@pytest.mark.parametrize('stack, below', [('onedl', 81), ('openmmlab', 70)])
def test_everything_is_pinned(setup_env, stack, below):
    text = (ROOT / 'requirements' / f'{stack}.txt').read_text()
    lines = [line.partition(' #')[0].strip() for line in text.splitlines() if line[0] != '#']
    assert all(re.match(r'[\w.-]+==[\w.]+( ;|$)', line) for line in lines)
    names = {line.partition('==')[0] for line in lines}
    assert names > {*setup_env.BASE, setup_env.STACKS[stack][0], 'uv'}
    # Needs libGL, and installs the same files as the headless one.
    assert 'opencv-python' not in names and 'opencv-python-headless' in names
    for line in (ROOT / 'requirements' / f'{stack}.in').read_text().split('\n'):
        requirement = line.partition('#')[0].strip()
        if '==' in requirement:
            assert requirement in lines
        elif requirement:
            assert re.match(r'[\w-]+', requirement)[0] in names
    # What `import repa_mm` advises is what is pinned here.
    assert {pins[1 + (stack == 'onedl')] for pins in compat.PACKAGES.values()} <= set(lines)
    # MMEngine and PyTorch 2.1 import pkg_resources.
    (setuptools,) = (line for line in lines if line.startswith('setuptools=='))
    assert int(setuptools.partition('==')[2].split('.')[0]) < below


# --------------------------------------------------- what is done, and what not


def test_the_steps_and_their_order(environment, commands, capsys):
    environment.make()
    wheel = f'{WHEEL}.whl'
    order = ['-m venv', 'pip install uv==', 'uv venv', ' torch ', 'pip wheel ', wheel, '-r ']
    found = [next(i for i, line in enumerate(commands) if part in line) for part in order]
    assert found == sorted(found)
    assert ' -e ' in commands[-2] and 'import torch' in commands[-1]
    assert 'is ready' in capsys.readouterr().out


def test_a_finished_environment_is_left_alone(environment, commands, capsys):
    environment.make()
    commands.clear()
    capsys.readouterr()
    environment.make()
    assert not commands and not capsys.readouterr().out
    environment.inputs += 'pytest==0\n'
    environment.make()
    assert any('-r ' in line for line in commands)
    assert not any('pip wheel ' in line for line in commands)


def test_a_run_after_a_failure_goes_on_there(setup_env, environment, commands, capsys):
    commands.fails = 'import mmdet'
    with pytest.raises(setup_env.SetupError) as info:
        environment.make()
    message = str(info.value)
    assert message.startswith('Step [7/7] failed: verifying')
    assert 'import mmdet: error: it fails' in message
    assert str(environment.state / 'verify.log') in message
    commands.fails = None
    commands.clear()
    environment.make()
    assert not any('pip wheel ' in line or 'uv venv' in line for line in commands)
    assert '[7/7] verifying' in capsys.readouterr().out
    assert environment.is_ready()


def test_an_interrupted_compilation_goes_on(setup_env, environment, commands):
    commands.fails = 'pip wheel '
    with pytest.raises(setup_env.SetupError, match='Step .4/7. failed: compiling onedl-mmcv'):
        environment.make()
    (environment.folder / 'source' / 'some.o').touch()
    commands.fails = None
    commands.clear()
    environment.make()
    assert not any(' download ' in line for line in commands)
    assert [path.name for path in environment.folder.glob('*.whl')] == [f'{WHEEL}.whl']
    assert not (environment.folder / 'source').exists()


def test_a_given_wheel_is_installed_and_kept(setup_env, environment, commands, tmp_path):
    wheel = tmp_path / f'{WHEEL}.whl'
    wheel.write_text('given')
    environment.wheel = wheel
    environment.make()
    assert not any('pip wheel ' in line for line in commands)
    wheel.unlink()
    again = setup_env.Environment('onedl', environment.venv)
    assert again.wheel.read_text() == 'given'


def test_the_python_that_is_built_on(environment, commands, monkeypatch):
    monkeypatch.setattr(sys, 'version_info', (3, 12, 1))
    environment.make()
    assert any(f'uv venv --seed --allow-existing --no-python-downloads --python {sys.executable} '
               in line for line in commands)  # fmt: skip
    shutil.rmtree(environment.venv)
    monkeypatch.setattr(sys, 'version_info', (3, 14, 0))
    commands.clear()
    environment.make()
    assert any('--python >=3.10,<=3.12.999 ' in line for line in commands)


def test_a_command_writes_its_log(setup_env, tmp_path, monkeypatch):
    monkeypatch.setenv('PYTHONPATH', 'elsewhere')
    log = tmp_path / 'x.log'
    code = 'import os; print("so far", os.environ.get("PYTHONPATH"), os.environ["MINE"])'
    assert setup_env.run([sys.executable, '-c', code], log, MINE='here') == 'so far None here\n'
    with pytest.raises(subprocess.CalledProcessError) as info:
        setup_env.run([sys.executable, '-c', 'print("again"); 1 / 0'], log)
    assert info.value.output.startswith('again') and 'ZeroDivisionError' in info.value.output
    assert 'so far' in log.read_text() and 'again' in log.read_text()


def test_progress(setup_env):
    assert (
        setup_env.progress('\n[1/78] c++ a\n  [3/78] c++ -MMD b\n x\n') == '3 of 78 files compiled'
    )
    assert setup_env.progress('Resolved\n Downloading torch \n\n') == 'Downloading torch'


# ------------------------------------------------------- a machine that lacks


@pytest.fixture
def try_compiler(setup_env, tmp_path, monkeypatch):
    environment = setup_env.Environment('onedl', tmp_path / 'env')
    environment.state.mkdir(parents=True)
    environment.python = tmp_path / 'python'
    environment.python.write_text(f'#!/bin/sh\necho {tmp_path}/python3.11\n')
    environment.python.chmod(0o755)
    header = tmp_path / 'python3.11' / 'Python.h'
    header.parent.mkdir()
    header.touch()

    def check():
        with pytest.raises(setup_env.SetupError) as info:
            environment.step('[2/7]', 'trying the C++ compiler', environment.try_compiler)
        return str(info.value)

    return check


@pytest.mark.parametrize('name', ['c++', 'g++-unheard-of'])
def test_no_compiler(try_compiler, monkeypatch, name):
    monkeypatch.setenv('PATH', '')
    monkeypatch.setenv('CXX', '' if name == 'c++' else name)
    message = try_compiler()
    assert message.startswith(f'No C++ compiler found ({name!r})')
    assert 'apt install build-essential' in message and 'dnf install gcc-c++' in message


def test_a_compiler_that_is_too_old(try_compiler, monkeypatch, tmp_path):
    compiler = tmp_path / 'old-c++'
    compiler.write_text('#!/bin/sh\necho "probe.cpp: unknown option -std=c++17"\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv('CXX', str(compiler))
    message = try_compiler()
    assert 'unknown option -std=c++17' in message and 'GCC 9' in message


def test_no_python_headers(try_compiler, tmp_path, monkeypatch):
    monkeypatch.setenv('CXX', 'true')
    (tmp_path / 'python3.11' / 'Python.h').unlink()
    message = try_compiler()
    assert 'python3.11-dev' in message and 'Python.h is missing' in message


def test_a_full_disk_is_noticed_first(setup_env, monkeypatch, tmp_path):
    monkeypatch.setattr(setup_env.shutil, 'disk_usage', lambda path: SimpleNamespace(free=3.2e9))
    with pytest.raises(setup_env.SetupError) as info:
        setup_env.check_disk(tmp_path / 'not' / 'yet')
    assert 'about 7 GB' in str(info.value) and '3.2 GB are free' in str(info.value)


def test_a_folder_that_is_something_else(setup_env, environment):
    environment.venv.mkdir()
    (environment.venv / 'thesis.tex').touch()
    with pytest.raises(setup_env.SetupError, match='not a virtual environment'):
        environment.make()
    assert [p.name for p in environment.venv.iterdir()] == ['thesis.tex']


def test_a_wheel_that_does_not_exist(tmp_path):
    arguments = ['--venv', str(tmp_path / 'env'), '--mmcv-wheel', str(tmp_path / 'mmcv.whl')]
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)
    assert done.returncode == 1
    assert 'mmcv.whl does not exist' in done.stderr
    assert not (tmp_path / 'env').exists()


@pytest.mark.parametrize('stack, version', [('onedl', 'mmcv-2.1.0'), ('openmmlab', WHEEL)])
def test_a_wheel_of_the_other_stack(setup_env, tmp_path, stack, version):
    wheel = tmp_path / f'{version}-cp311-cp311-linux_x86_64.whl'
    with pytest.raises(setup_env.SetupError, match='is another'):
        setup_env.Environment(stack, tmp_path, wheel)


@pytest.mark.parametrize('cores, memory_gb, jobs', [(8, 64, 8), (8, 5, 2), (2, 1, 1)])
def test_memory_limits_the_compiler_processes(setup_env, monkeypatch, cores, memory_gb, jobs):
    monkeypatch.delenv('MAX_JOBS', raising=False)
    monkeypatch.setattr(setup_env.os, 'sched_getaffinity', lambda pid: range(cores))
    monkeypatch.setattr(
        setup_env,
        'Path',
        lambda name: SimpleNamespace(
            read_text=lambda: (
                f'MemAvailable: {memory_gb * 10**6} kB' if 'meminfo' in name else 'max'
            )
        ),
    )
    assert setup_env.compile_jobs() == jobs
    monkeypatch.setenv('MAX_JOBS', '3')
    assert setup_env.compile_jobs() == 3


# ------------------------------------------------------------ while it runs


@pytest.mark.parametrize(
    'output, advice',
    [
        ('OSError: [Errno 28] No space left on device', 'disk is full'),
        ('g++: fatal error: Killed signal terminated program cc1plus', 'MAX_JOBS=1'),
        ('error: No interpreter found for Python >=3.10', 'PYTHON=/path/to/python3.11'),
        ('Caused by: dns error: failed to lookup address information', 'HTTPS_PROXY'),
        ('Temporary failure in name resolution', 'HTTPS_PROXY'),
        ('invalid peer certificate: UnknownIssuer', 'SSL_CERT_FILE'),
        ('ERROR: No matching distribution found for uv==0.1', 'package index'),
        ('The detected CUDA version (11.8) mismatches', 'FORCE_CUDA=0'),
        ('Permission denied (os error 13)', 'another user'),
        ('something never seen', 'again repeats this step only'),
    ],
)
def test_a_failure_comes_with_advice(setup_env, tmp_path, output, advice):
    # torch mentions CUDA_HOME at the start of every compilation.
    output = 'No CUDA runtime is found, using CUDA_HOME=/usr\n' + 'a line\n' * 50 + output
    text = setup_env.explain(output, tmp_path / 'x.log', venv='.venv', pythons='3.10, 3.11')
    assert output.splitlines()[-1] in text and str(tmp_path / 'x.log') in text
    assert advice in text.partition('What to do: ')[2]


def test_an_error_in_the_middle_is_shown(setup_env, tmp_path):
    output = 'a line\n' * 50 + 'x.cpp:7:1: error: expected ;\n' + 'a line\n' * 50
    text = setup_env.explain(output, tmp_path / 'x.log', venv='.venv', pythons='3.11')
    assert 'x.cpp:7:1: error: expected ;' in text
    assert 'again repeats this step only' in text


# ------------------------------------------------------------------- with a GPU


@pytest.mark.parametrize(
    'available, version, toolkit, hidden',
    [
        (False, '13.0', None, False),  # no GPU: nothing to hide
        (True, '13.0', '13.1', False),  # a toolkit that fits: CUDA operators
        (True, '13.0', '12.4', True),
        (True, '13.0', None, True),
        (True, None, None, False),  # ROCm: mmcv knows how
    ],
)
def test_operators_for_the_gpu(
    setup_env, tmp_path, monkeypatch, available, version, toolkit, hidden
):
    """The question to PyTorch, asked of a stand-in for it."""
    monkeypatch.delenv('FORCE_CUDA', raising=False)
    stand_in = tmp_path / 'torch'
    (stand_in / 'utils').mkdir(parents=True)
    (stand_in / '__init__.py').write_text(
        'from types import SimpleNamespace as N\n'
        f'version, cuda = N(cuda={version!r}), N(is_available=lambda: {available})\n'
    )
    (stand_in / 'utils' / '__init__.py').touch()
    (stand_in / 'utils' / 'cpp_extension.py').write_text(f'CUDA_HOME = {str(tmp_path)!r}\n')
    if toolkit:
        nvcc = tmp_path / 'bin' / 'nvcc'
        nvcc.parent.mkdir()
        nvcc.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release {toolkit}, V1"\n')
        nvcc.chmod(0o755)
    environment = setup_env.Environment('onedl', tmp_path / 'env')
    environment.python, environment.log = sys.executable, tmp_path / 'x.log'
    monkeypatch.setattr(
        setup_env, 'CUDA', f'import sys; sys.path[0] = {str(tmp_path)!r}\n{setup_env.CUDA}'
    )
    assert environment.cuda_env() == (dict(CUDA_VISIBLE_DEVICES='') if hidden else {})
    monkeypatch.setenv('FORCE_CUDA', '1')
    assert environment.cuda_env() == {}


@pytest.mark.parametrize(
    'said, written',
    [('torch 2.13.0\n', ''), ('torch 2.13.0\nhide the GPU\n', 'CUDA_VISIBLE_DEVICES=\n')],
)
def test_a_gpu_without_operators_is_hidden(
    setup_env, environment, monkeypatch, capsys, said, written
):
    environment.make()
    capsys.readouterr()
    monkeypatch.setattr(setup_env, 'run', lambda *a, **k: said)
    environment.verify()
    assert (environment.state / 'run-env').read_text() == written
    assert ('use the CPU' in capsys.readouterr().out) == bool(written)
