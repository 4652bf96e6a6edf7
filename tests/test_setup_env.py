"""The set-up: its pins, what it does again, and what it says when it fails."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
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


@pytest.fixture
def environment(setup_env, tmp_path, monkeypatch):
    """An environment that was never made, and is not to be made here."""
    monkeypatch.setattr(setup_env.Environment, 'make_venv', None)
    monkeypatch.delenv('MMCV_WHEEL', raising=False)
    return setup_env.Environment('onedl', tmp_path / 'env')


def finish(environment):
    """Pretend that every step is done."""
    environment.python.parent.mkdir(parents=True)
    environment.python.touch()
    environment.state.mkdir()
    for name, key in environment.keys.items():
        (environment.state / f'{name}.done').write_text(key)


# ------------------------------------------------------------------- the pins


@pytest.mark.parametrize('stack', ['onedl', 'openmmlab'])
def test_everything_is_pinned(setup_env, stack):
    pins = setup_env.read_pins(stack)
    lines = sum(pins.values(), [])
    assert all(re.match(r'[\w.-]+==[\w.]+( ;|$)', line) for line in lines)
    names = {line.partition('==')[0] for line in lines}
    # Needs libGL, and installs the same files as the headless one.
    assert 'opencv-python' not in names
    assert 'opencv-python-headless' in names
    for line in (ROOT / 'requirements' / f'{stack}.in').read_text().split('\n'):
        requirement = line.partition('#')[0].strip()
        if '==' in requirement:
            assert requirement in lines
        elif requirement:
            assert re.match(r'[\w-]+', requirement)[0] in names


@pytest.mark.parametrize('stack, limit', [('onedl', 81), ('openmmlab', 70)])
def test_setuptools_still_has_pkg_resources(setup_env, stack, limit):
    (pin,) = (
        line for line in setup_env.read_pins(stack)['base'] if line.startswith('setuptools==')
    )
    assert int(pin.partition('==')[2].split('.')[0]) < limit


@pytest.mark.parametrize('stack', ['openmmlab', 'onedl'])
def test_the_advice_of_the_import_check_is_what_is_pinned(setup_env, stack):
    lines = sum(setup_env.read_pins(stack).values(), [])
    for package in compat.PACKAGES.values():
        assert package.pins[stack == 'onedl'] in lines


def test_torch_and_mmcv_come_before_the_rest(setup_env):
    pins = setup_env.read_pins('onedl')
    base = {re.match(r'[\w-]+', line)[0] for line in pins['base']}
    assert {'torch', 'torchvision', 'setuptools', 'wheel', 'ninja'} <= base
    assert pins['mmcv'][0].startswith('onedl-mmcv==')
    assert not any(line.startswith(('torch', 'nvidia', 'onedl-mmcv')) for line in pins['rest'])


# --------------------------------------------------- what is done, and what not


def test_a_finished_environment_has_nothing_to_do(environment):
    assert environment.pending() == list(environment.keys)
    finish(environment)
    assert environment.pending() == []


def test_a_finished_environment_is_left_alone(environment):
    finish(environment)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), '--venv', str(environment.venv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert (done.returncode, done.stdout) == (0, b'')


@pytest.mark.parametrize(
    'part, first', [('uv', 'venv'), ('base', 'torch'), ('mmcv', 'mmcv'), ('rest', 'packages')]
)
def test_a_changed_pin_repeats_its_step_and_those_after(environment, part, first):
    finish(environment)
    environment.pins[part][-1] += '.post1'
    environment.keys = environment._keys()
    names = list(environment.keys)
    assert environment.pending() == names[names.index(first) :]


def test_an_interrupted_step_is_repeated(environment):
    finish(environment)
    (environment.state / 'packages.done').unlink()
    assert environment.pending() == ['packages', 'plugin', 'verify']


def test_a_step_that_fails_leaves_no_stamp(setup_env, environment, monkeypatch, capsys):
    finish(environment)
    (environment.state / 'verify.done').write_text('of another version')
    monkeypatch.setattr(environment, 'check', lambda pending: None)
    environment.base_python = dict(version='3.11')

    def verify():
        setup_env.run([sys.executable, '-c', 'print("so far"); 1 / 0'], environment.log('verify'))

    monkeypatch.setattr(environment, 'verify', verify)
    with pytest.raises(setup_env.SetupError) as info:
        environment.make()
    message = str(info.value)
    assert message.startswith('Step [6/6] failed: verifying')
    assert 'ZeroDivisionError' in message
    assert str(environment.log('verify')) in message
    assert 'so far' in environment.log('verify').read_text()
    assert environment.pending() == ['verify']
    monkeypatch.setattr(environment, 'verify', lambda: None)
    assert environment.make()
    assert environment.pending() == []
    assert '[6/6] verifying' in capsys.readouterr().out


def test_a_wheel_compiled_for_this_torch_is_used_again(environment):
    folder = environment.state / f'mmcv-{environment.keys["mmcv"][:12]}'
    folder.mkdir(parents=True)
    (folder / 'onedl_mmcv-2.3.6.whl').touch()
    assert environment.compile_mmcv() == folder / 'onedl_mmcv-2.3.6.whl'


# ------------------------------------------------------- a machine that lacks


def test_no_supported_python(setup_env, monkeypatch):
    monkeypatch.setattr(setup_env, 'probe', lambda python: dict(version='3.14'))
    with pytest.raises(setup_env.SetupError) as info:
        setup_env.find_python(('3.11', '3.10'))
    assert '3.10, 3.11' in str(info.value)
    assert 'PYTHON=/path/to/python3.11' in str(info.value)


def test_another_supported_python_is_found(setup_env, monkeypatch, tmp_path):
    """`python3` is too new, `python3.11` does not run, `python3.10` does."""
    for name in ('python3.11', 'python3.10'):
        (tmp_path / name).write_text('#!/bin/sh\nexit 1\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv('PATH', str(tmp_path))
    monkeypatch.setenv('PYENV_ROOT', str(tmp_path))

    def probe(python):
        if python == sys.executable:
            return dict(version='3.13', executable=python)
        if python.endswith('3.10'):
            return dict(version='3.10', executable=python)

    monkeypatch.setattr(setup_env, 'probe', probe)
    found = setup_env.find_python(('3.11', '3.10'))
    assert found['executable'] == str(tmp_path / 'python3.10')


def test_probe(setup_env, tmp_path):
    found = setup_env.probe(sys.executable)
    assert found['version'] == '.'.join(map(str, sys.version_info[:2]))
    assert setup_env.probe('/bin/false') is None
    assert setup_env.probe(tmp_path / 'missing') is None


@pytest.fixture
def headers(tmp_path):
    header = tmp_path / 'include' / 'Python.h'
    header.parent.mkdir()
    header.touch()
    return dict(version='3.11', executable='python3.11', header=str(header))


def test_no_compiler(setup_env, monkeypatch, headers):
    monkeypatch.delenv('CXX', raising=False)
    monkeypatch.setenv('PATH', '')
    monkeypatch.setattr(sys, 'platform', 'linux')
    with pytest.raises(setup_env.SetupError) as info:
        setup_env.find_compiler(headers)
    message = str(info.value)
    assert message.startswith('No C++ compiler found')
    assert 'apt install build-essential' in message
    assert 'dnf install gcc-c++' in message
    monkeypatch.setattr(sys, 'platform', 'darwin')
    with pytest.raises(setup_env.SetupError, match='xcode-select'):
        setup_env.find_compiler(headers)


def test_a_compiler_that_does_not_exist(setup_env, monkeypatch, headers):
    monkeypatch.setenv('CXX', 'g++-unheard-of')
    with pytest.raises(setup_env.SetupError, match="'g\\+\\+-unheard-of'"):
        setup_env.find_compiler(headers)


def test_a_compiler_that_is_too_old(setup_env, monkeypatch, headers, tmp_path):
    compiler = tmp_path / 'old-c++'
    compiler.write_text('#!/bin/sh\necho "unknown option -std=c++17"\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv('CXX', str(compiler))
    with pytest.raises(setup_env.SetupError) as info:
        setup_env.find_compiler(headers)
    assert 'unknown option -std=c++17' in str(info.value)
    assert 'GCC 9' in str(info.value)


def test_no_python_headers(setup_env, headers):
    headers['header'] += '.missing'
    with pytest.raises(setup_env.SetupError, match='python3.11-dev'):
        setup_env.find_compiler(headers)


def test_no_venv_module(setup_env, environment, monkeypatch):
    monkeypatch.setattr(
        setup_env,
        'find_python',
        lambda supported: dict(version='3.11', executable='/usr/bin/python3.11', venv=False),
    )
    with pytest.raises(setup_env.SetupError, match='python3.11-venv'):
        environment.check(environment.pending())


def test_a_full_disk_is_noticed_first(setup_env, monkeypatch, tmp_path):
    monkeypatch.setattr(setup_env.shutil, 'disk_usage', lambda path: SimpleNamespace(free=3.2e9))
    with pytest.raises(setup_env.SetupError) as info:
        setup_env.check_disk(tmp_path / 'not' / 'yet', 7)
    assert 'about 7 GB' in str(info.value) and '3.2 GB are free' in str(info.value)
    setup_env.check_disk(tmp_path, 3)


def test_a_folder_that_is_something_else(setup_env, environment):
    environment.venv.mkdir()
    (environment.venv / 'thesis.tex').touch()
    with pytest.raises(setup_env.SetupError, match='not a virtual environment'):
        environment.make()
    assert [p.name for p in environment.venv.iterdir()] == ['thesis.tex']


def test_an_environment_of_another_python(setup_env, environment, monkeypatch):
    finish(environment)
    monkeypatch.setattr(setup_env, 'probe', lambda python: dict(version='3.13'))
    with pytest.raises(setup_env.SetupError, match='rm -r'):
        environment.check(['verify'])


def test_a_wheel_that_does_not_exist(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            str(SCRIPT),
            '--venv',
            str(tmp_path / 'env'),
            '--mmcv-wheel',
            str(tmp_path / 'mmcv.whl'),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert 'mmcv.whl does not exist' in done.stderr
    assert not (tmp_path / 'env').exists()


def test_a_wheel_of_the_other_stack(setup_env, tmp_path):
    for name, stack in (
        ('mmcv-2.1.0-cp311-cp311-linux_x86_64.whl', 'onedl'),
        ('onedl_mmcv-2.3.6-cp311-cp311-linux_x86_64.whl', 'openmmlab'),
    ):
        other = {'onedl': 'openmmlab', 'openmmlab': 'onedl'}[stack]
        setup_env.Environment(other, tmp_path, tmp_path / name)
        with pytest.raises(setup_env.SetupError, match='is another'):
            setup_env.Environment(stack, tmp_path, tmp_path / name)


@pytest.mark.parametrize('cores, memory_gb, jobs', [(8, 64, 8), (8, 5, 2), (2, 1, 1)])
def test_memory_limits_the_compiler_processes(setup_env, monkeypatch, cores, memory_gb, jobs):
    monkeypatch.delenv('MAX_JOBS', raising=False)
    monkeypatch.setattr(setup_env.os, 'sched_getaffinity', lambda pid: range(cores), raising=False)
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
        ('x.cpp:1: fatal error: Python.h: No such file or directory', '3.11-dev'),
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
    error = subprocess.CalledProcessError(1, ['x'], 'first\n' + output + '\n')
    text = setup_env.explain(
        error,
        tmp_path / 'x.log',
        dict(venv='.venv', disk=7, pythons='3.10, 3.11', headers=setup_env.headers_hint('3.11')),
    )
    assert output in text and str(tmp_path / 'x.log') in text
    assert advice in text.partition('What to do: ')[2]


def test_advice_follows_the_end_of_a_long_output(setup_env, tmp_path):
    """torch mentions CUDA_HOME at the start of every compilation."""
    output = (
        'No CUDA runtime is found, using CUDA_HOME=/usr\n'
        + 'a line\n' * 50
        + 'x.cpp:7:1: error: expected ;\n'
        + 'a line\n' * 50
    )
    text = setup_env.explain(
        subprocess.CalledProcessError(1, ['x'], output),
        tmp_path / 'x.log',
        dict(venv='.venv', disk=7, pythons='3.11', headers=''),
    )
    assert 'x.cpp:7:1: error: expected ;' in text
    assert 'again repeats this step only' in text


def test_a_compilation_shows_how_far_it_is(setup_env, capsys):
    progress = setup_env.Progress()
    for line in ('  creating build\n', '  [3/78] c++ -MMD a.cpp\n', '  warning: something\n'):
        progress.line(line)
    progress.tick(period=0)
    assert '3 of 78 files compiled' in capsys.readouterr().out


def test_stopping_reaches_what_a_command_started(setup_env, tmp_path):
    process = subprocess.Popen(
        ['sh', '-c', 'sleep 60 & echo $!; wait'], stdout=subprocess.PIPE, start_new_session=True
    )
    child = int(process.stdout.readline())
    setup_env.stop(process)
    assert process.returncode is not None
    for _ in range(100):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        # A zombie that nobody has collected yet has ended too.
        status = Path(f'/proc/{child}/stat')
        if status.exists() and ') Z ' in status.read_text():
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    pytest.fail('the command went on running')


# ------------------------------------------------------------------- with a GPU


@pytest.mark.parametrize(
    'available, version, toolkit, hidden',
    [
        ('False', '13.0', None, False),  # no GPU: nothing to hide
        ('True', '13.0', '13.1', False),  # a toolkit that fits: CUDA operators
        ('True', '13.0', '12.4', True),
        ('True', '13.0', None, True),
        ('True', 'None', None, False),  # ROCm: mmcv knows how
    ],
)
def test_operators_for_the_gpu(
    setup_env, environment, monkeypatch, available, version, toolkit, hidden
):
    monkeypatch.delenv('FORCE_CUDA', raising=False)
    monkeypatch.setattr(setup_env, 'run', lambda *a, **k: f'cuda {version} {available}\n')
    monkeypatch.setattr(setup_env, 'cuda_toolkit', lambda: toolkit)
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
    environment.state.mkdir(parents=True)
    monkeypatch.setattr(setup_env, 'run', lambda *a, **k: said)
    environment.verify()
    assert (environment.state / 'run-env').read_text() == written
    assert ('use the CPU' in capsys.readouterr().out) == bool(written)


def test_cuda_toolkit(setup_env, monkeypatch, tmp_path):
    nvcc = tmp_path / 'bin' / 'nvcc'
    nvcc.parent.mkdir()
    nvcc.write_text('#!/bin/sh\necho "Cuda compilation tools, release 12.4, V1"\n')
    nvcc.chmod(0o755)
    monkeypatch.setenv('CUDA_HOME', str(tmp_path))
    assert setup_env.cuda_toolkit() == '12.4'
