"""Set up an environment with one of the two pinned stacks.

    python3 requirements/setup_env.py --stack onedl --venv .venv

Creates a virtual environment, installs PyTorch, compiles mmcv against it,
installs the other pinned packages and this project, and verifies the result.
Steps that are done are skipped, an interrupted step is done again. Needs
nothing but Python's standard library; ``make env`` calls it.
"""

import argparse
import contextlib
import hashlib
import json
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent
ROOT = REQUIREMENTS.parent

# `disk` in GB: the finished environment plus the largest downloads and object
# files that lie beside it while it is being made.
STACKS = {
    'onedl': dict(mmcv='onedl-mmcv', pythons=('3.11', '3.12', '3.10'), disk=7),
    'openmmlab': dict(mmcv='mmcv', pythons=('3.11', '3.10'), disk=7),
}
# Installed before mmcv, because mmcv is compiled against and with them.
BASE = ('torch', 'torchvision', 'setuptools', 'wheel', 'ninja', 'numpy')
# The libraries that torch itself asks for come with it, so that another build
# of torch (a CPU-only one, say) does not get them.
WITH_TORCH = ('nvidia-', 'cuda-', 'triton')
# Minutes that one core of an ordinary machine takes to compile mmcv.
COMPILE_CORE_MINUTES = 16
# What one compiler process needs on mmcv's largest files.
COMPILE_GB = 2

VERIFY = """
import torch, torchvision, mmengine, mmcv
import mmcv._ext, mmcv.ops
import mmdet.models, mmseg.models, mmpretrain.models, repa_mm
from mmcv.ops import nms
boxes = torch.tensor([[0., 0., 2., 2.], [0., 0., 2., 1.9], [5., 5., 6., 6.]])
kept = nms(boxes, torch.tensor([.9, .8, .7]), 0.5)[1].tolist()
assert kept == [0, 2], f'mmcv.ops.nms keeps {kept} instead of [0, 2]'
for module in (torch, torchvision, mmengine, mmcv, mmdet, mmseg, mmpretrain,
               repa_mm):
    print(f'{module.__name__} {module.__version__}')
if torch.cuda.is_available():
    from mmcv.ops import get_compiling_cuda_version
    if get_compiling_cuda_version() == 'not available':
        print('hide the GPU')
"""

PROBE = """
import importlib.util as u, json, os, sys, sysconfig
print(json.dumps(dict(
    version='%d.%d' % sys.version_info[:2], executable=sys.executable,
    header=os.path.join(sysconfig.get_paths()['include'], 'Python.h'),
    venv=bool(u.find_spec('venv') and u.find_spec('ensurepip')))))
"""

NETWORK = (
    'The network or the package index could not be reached. Check the '
    'connection; behind a proxy set HTTPS_PROXY; where an own certificate '
    'authority is in use set SSL_CERT_FILE and UV_SYSTEM_CERTS=1. Then run the '
    'same command again: what is already installed stays.'
)

# What a failed step's log says -> what to do about it.
REMEDIES = (
    (
        r'No space left on device|Disk quota exceeded|os error 28',
        'The disk is full. Free some space (the whole stack needs about {disk} '
        'GB, and uv keeps its downloads in ~/.cache/uv) and run the same command '
        'again.',
    ),
    (
        r'Killed signal|signal terminated program|cannot allocate memory|'
        r'out of memory|MemoryError',
        'The compiler ran out of memory. Run again with fewer compiler processes '
        'at a time: MAX_JOBS=1 make ...',
    ),
    (r'Python\.h: No such file', 'The headers of Python are missing: {headers}'),
    (
        r'name resolution|resolve host|lookup address|dns error|'
        r'Network is unreachable|Connection refused|Connection reset|'
        r'error sending request|[Tt]imed out|CERTIFICATE_VERIFY|invalid peer '
        r'certificate|NewConnectionError|ProxyError|client error \(Connect\)|'
        r'tunnel error|Could not connect',
        NETWORK,
    ),
    (
        r'No matching distribution|No solution found|not found in the package '
        r'registry|has no wheels with a matching',
        'The package index does not offer a pinned package for this Python and '
        'platform. Supported are Python {pythons} on 64-bit Linux; if a mirror '
        'is set (pip.conf, UV_INDEX_URL), check that it is up to date.',
    ),
    (
        r'CUDA_HOME|nvcc|detected CUDA version',
        'The CUDA toolkit does not fit PyTorch. To compile the operators for the '
        'CPU only: CUDA_VISIBLE_DEVICES= FORCE_CUDA=0 make ...',
    ),
    (
        r'Permission denied',
        'A file could not be written. Was an earlier run made by another user '
        '(sudo)? Then remove {venv} and run the same command again.',
    ),
)


class SetupError(Exception):
    """A step failed; the message says why and what to do."""


# --------------------------------------------------------------- the machine


def probe(python):
    """Ask an interpreter what it is; None if it does not run."""
    try:
        done = subprocess.run(
            [str(python), '-c', PROBE],
            timeout=60,
            env=child_env(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        return json.loads(done.stdout.decode()) if not done.returncode else None
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def find_python(supported):
    """The interpreter to build on: this one, else the first that fits."""
    names = [sys.executable]
    names += [shutil.which(f'python{version}') for version in supported]
    pyenv = Path(os.environ.get('PYENV_ROOT', Path.home() / '.pyenv'))
    for version in supported:
        # `python3.11` of pyenv is a shim that need not work.
        names += sorted(pyenv.glob(f'versions/{version}.*/bin/python3'))
    for name in filter(None, names):
        found = probe(name)
        if found and found['version'] in supported:
            return found
    versions = ', '.join(sorted(supported))
    this = '.'.join(map(str, sys.version_info[:3]))
    raise SetupError(
        f'This stack needs Python {versions}; this is Python {this}, and none '
        'of the others was found.\nInstall one of them and name it: '
        f'make ... PYTHON=/path/to/python{supported[0]}'
    )


def package_hint(debian, fedora, macos):
    """How to install something, for the system at hand."""
    if sys.platform == 'darwin':
        return f'on macOS: {macos}'
    return f'on Debian/Ubuntu: {debian}; on Fedora: {fedora}'


def headers_hint(version):
    """How to install the C headers of a Python."""
    return package_hint(
        f'sudo apt install python{version}-dev',
        f'sudo dnf install python{version}-devel',
        f'brew install python@{version}',
    )


def find_compiler(python):
    """The C++ compiler, proved by a small file that includes Python.h."""
    if not Path(python['header']).is_file():
        version = python['version']
        raise SetupError(
            f'{python["executable"]} has no C headers ({python["header"]} is '
            'missing), and mmcv is compiled against them.\nInstall them, ' + headers_hint(version)
        )
    hint = package_hint(
        'sudo apt install build-essential',
        'sudo dnf install gcc-c++ make',
        'xcode-select --install',
    )
    names = shlex.split(os.environ.get('CXX', '')) or next(
        ([name] for name in ('c++', 'g++', 'clang++') if shutil.which(name)), None
    )
    if not names or not shutil.which(names[0]):
        missing = f' (CXX names {names[0]!r})' if names else ''
        raise SetupError(
            f'No C++ compiler found{missing}: mmcv has to be compiled.\nInstall one, {hint}'
        )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, 'probe.cpp')
        source.write_text(
            '#include <Python.h>\n#include <optional>\n'
            'int main() { return std::optional<int>(0).value(); }\n'
        )
        done = subprocess.run(
            [
                *names,
                '-std=c++17',
                '-fsyntax-only',
                '-I' + str(Path(python['header']).parent),
                str(source),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        message = '\n'.join(done.stdout.decode(errors='replace').splitlines()[:10])
        raise SetupError(
            f'The C++ compiler {names[0]!r} cannot compile a '
            f'small C++17 file:\n{message}\n'
            f'Install a newer one (GCC 9 or later), {hint}'
        )
    return names


def existing_parent(path):
    """The nearest folder above a path that exists, or the path itself."""
    path = Path(path).absolute()
    while not path.exists():
        path = path.parent
    return path


def check_disk(venv, need):
    """Raise if there is less than `need` GB for the environment or uv."""
    cache = os.environ.get('UV_CACHE_DIR') or Path(
        os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache', 'uv'
    )
    seen = set()
    for what, path in (('the environment', venv), ("uv's downloads", cache)):
        place = existing_parent(path)
        device = place.stat().st_dev
        free = shutil.disk_usage(place).free / 1e9
        if device not in seen and free < need:
            raise SetupError(
                f'Too little disk space for {what}: about {need} GB are '
                f'needed, {free:.1f} GB are free at {place}.\nFree some space'
                + (
                    '.'
                    if what == 'the environment'
                    else ', or set UV_CACHE_DIR to a folder on another disk.'
                )
            )
        seen.add(device)


def compile_jobs():
    """Compiler processes at a time: one a core, as far as memory allows."""
    if os.environ.get('MAX_JOBS'):
        return max(1, int(os.environ['MAX_JOBS']))
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    limits = []
    with contextlib.suppress(OSError, AttributeError):
        text = Path('/proc/meminfo').read_text()
        limits.append(1024 * int(re.search(r'MemAvailable:\s+(\d+)', text)[1]))
    with contextlib.suppress(OSError, ValueError):
        # "max" where the container has no limit
        limits.append(int(Path('/sys/fs/cgroup/memory.max').read_text()))
    memory = min(limits) if limits else cores * COMPILE_GB * 1e9
    return max(1, min(cores, int(memory / (COMPILE_GB * 1e9))))


def cuda_toolkit():
    """Version of the CUDA compiler, 'major.minor', or None."""
    homes = [os.environ.get('CUDA_HOME'), os.environ.get('CUDA_PATH')]
    names = [os.path.join(home, 'bin', 'nvcc') for home in homes if home]
    for name in names + ['nvcc', '/usr/local/cuda/bin/nvcc']:
        if shutil.which(name):
            done = subprocess.run([name, '--version'], stdout=subprocess.PIPE)
            found = re.search(r'release (\d+\.\d+)', done.stdout.decode())
            return found and found[1]
    return None


# ------------------------------------------------------------------ the pins


def normalize(name):
    """A distribution's name as package indexes spell it."""
    return re.sub(r'[-_.]+', '-', name).lower()


def read_pins(stack):
    """The stack's pins by part: dict of lists of requirement lines."""
    parts = dict(uv=[], base=[], mmcv=[], rest=[])
    path = REQUIREMENTS / f'{stack}.txt'
    for line in path.read_text().splitlines():
        line = line.partition('#')[0].strip()
        if not line:
            continue
        name = normalize(re.match(r'[\w.-]+', line)[0])
        if name == 'uv':
            parts['uv'].append(line)
        elif name in BASE or name.startswith(WITH_TORCH):
            parts['base'].append(line)
        elif name == STACKS[stack]['mmcv']:
            parts['mmcv'].append(line)
        else:
            parts['rest'].append(line)
    for part in ('uv', 'mmcv'):
        if len(parts[part]) != 1:
            raise SetupError(f'{path} should pin {part} exactly once, but has {parts[part]}')
    return parts


# ------------------------------------------------------- commands, with a log


def child_env(**extra):
    """The environment of a command, without what would redirect its Python or pip."""
    env = dict(os.environ)
    for name in (
        'PYTHONPATH',
        'PYTHONHOME',
        'VIRTUAL_ENV',
        'PIP_USER',
        'PIP_TARGET',
        'PIP_PREFIX',
        '__PYVENV_LAUNCHER__',
    ):
        env.pop(name, None)
    env.update(PYTHONNOUSERSITE='1', PIP_DISABLE_PIP_VERSION_CHECK='1', **extra)
    return env


def clock(seconds):
    """A duration as minutes:seconds."""
    return f'{int(seconds) // 60}:{int(seconds) % 60:02d}'


class Progress:
    """Shows that a command moves: in place on a terminal, else in lines."""

    def __init__(self):
        self.start = self.shown = time.monotonic()
        self.tty = sys.stdout.isatty()
        self.text = ''

    def line(self, line):
        counted = re.search(r'\[(\d+)/(\d+)\] ', line)
        if counted:
            self.text = f'{counted[1]} of {counted[2]} files compiled'
        elif 'bdist_wheel' in line or ' -shared ' in line:
            self.text = 'linking and packing'
        elif not self.text.endswith('compiled') and line.strip():
            self.text = line.strip()

    def tick(self, period=20):
        now = time.monotonic()
        if now - self.shown < (0.5 if self.tty else period):
            return
        self.shown = now
        text = f'      {clock(now - self.start)}  {self.text}'
        if self.tty:
            width = shutil.get_terminal_size().columns - 1
            print('\r' + text[:width].ljust(width), end='', flush=True)
        else:
            print(text[:120], flush=True)

    def close(self):
        if self.tty:
            print('\r' + ' ' * (shutil.get_terminal_size().columns - 1) + '\r', end='', flush=True)


def stop(process):
    """End a command and everything that it started."""
    for number, patience in ((signal.SIGINT, 5), (signal.SIGTERM, 5), (signal.SIGKILL, 5)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            # Its children may ignore an interrupt, as a shell's do.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return


def run(command, log, cwd=None, **extra_env):
    """Run a command with its output in `log`.

    Returns its output; raises subprocess.CalledProcessError.
    """
    lines, progress = queue.Queue(), Progress()
    with open(log, 'a', encoding='utf-8', errors='replace') as file:
        file.write('$ ' + ' '.join(shlex.quote(str(c)) for c in command) + '\n')
        file.flush()
        # A process group of its own lets `stop` reach the compilers too.
        process = subprocess.Popen(
            [str(c) for c in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=cwd,
            env=child_env(**extra_env),
            start_new_session=True,
        )

        def read():
            for raw in process.stdout:
                lines.put(raw.decode(errors='replace'))
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        output = []
        try:
            while True:
                try:
                    line = lines.get(timeout=0.5)
                except queue.Empty:
                    progress.tick()
                    continue
                if line is None:
                    break
                output.append(line)
                file.write(line)
                file.flush()
                progress.line(line)
                progress.tick()
            code = process.wait()
        except BaseException:
            stop(process)
            raise
        finally:
            progress.close()
    if code:
        raise subprocess.CalledProcessError(code, command, ''.join(output))
    return ''.join(output)


def explain(error, log, advice):
    """The end of a failed command's output, and what to do."""
    lines = [line.rstrip()[:200] for line in error.output.splitlines()]
    shown = [line for line in lines if re.search(r'\berror\b', line, re.I)][:5]
    shown += [line for line in lines[-12:] if line not in shown]
    # The end only: a compiler's output is long, and mentions a lot.
    end = '\n'.join(shown + lines[-40:])
    what = next(
        (text for pattern, text in REMEDIES if re.search(pattern, end, re.I)),
        'Running the same command again repeats this step only. If it '
        f'keeps failing, remove {advice["venv"]} and start anew.',
    )
    return (
        '\n'.join('      ' + line for line in shown)
        + f'\n      whole log: {log}\nWhat to do: '
        + what.format(**advice)
    )


# ----------------------------------------------------------------- the steps


class Environment:
    """One environment and the steps that lead to it.

    Args:
        stack (str): 'onedl' or 'openmmlab'.
        venv (Path): The environment's folder.
        mmcv_wheel (Path, optional): A compiled mmcv to use.
    """

    def __init__(self, stack, venv, mmcv_wheel=None):
        self.stack, self.venv, self.mmcv_wheel = stack, venv, mmcv_wheel
        self.state = venv / '.setup'
        self.python = venv / 'bin' / 'python'
        self.pins = read_pins(stack)
        pin = self.pins['mmcv'][0].partition(';')[0].strip()
        start = pin.replace('-', '_').replace('==', '-') + '-'
        if mmcv_wheel and not mmcv_wheel.name.startswith(start):
            raise SetupError(f'This stack needs a wheel of {pin}; {mmcv_wheel} is another.')
        self.keys = self._keys()

    def steps(self):
        """(name, title, method) of every step, in their order."""
        mmcv = self.pins['mmcv'][0].partition(';')[0].strip().replace('==', ' ')
        if self.mmcv_wheel:
            mmcv = f'installing {mmcv} from {self.mmcv_wheel.name}'
        else:
            jobs = compile_jobs()
            minutes = max(1, round(COMPILE_CORE_MINUTES / jobs))
            mmcv = f'compiling {mmcv} (about {minutes} minutes with {jobs} compiler processes)'
        torch = next(p for p in self.pins['base'] if p.startswith('torch=='))
        return (
            ('venv', f'creating {self.venv}', self.make_venv),
            (
                'torch',
                f'installing {torch.partition(";")[0].strip()} (a download of up to 3 GB)',
                self.install_torch,
            ),
            ('mmcv', mmcv, self.install_mmcv),
            (
                'packages',
                f'installing {len(self.pins["rest"])} other packages',
                self.install_packages,
            ),
            ('plugin', 'installing RePa-MM itself (editable)', self.install_plugin),
            ('verify', 'verifying that everything imports', self.verify),
        )

    def _keys(self):
        """What each step depends on, as a chain of hashes."""
        setup = b''.join((ROOT / name).read_bytes() for name in ('setup.py', 'repa_mm/version.py'))
        inputs = dict(
            venv=[self.stack, *self.pins['uv']],
            torch=self.pins['base'],
            mmcv=self.pins['mmcv'],
            packages=self.pins['rest'],
            plugin=[str(ROOT), hashlib.sha256(setup).hexdigest()],
            verify=[VERIFY],
        )
        keys, key = {}, ''
        for name, content in inputs.items():
            key = hashlib.sha256(json.dumps([key, content]).encode()).hexdigest()
            keys[name] = key
        return keys

    def done(self, name):
        stamp = self.state / f'{name}.done'
        return stamp.is_file() and stamp.read_text() == self.keys[name]

    def pending(self):
        """Names of the steps to do: the first that is not done, and on."""
        names = list(self.keys)
        if not self.python.exists():
            return names
        return next((names[i:] for i, name in enumerate(names) if not self.done(name)), [])

    def log(self, name):
        return self.state / f'{name}.log'

    def check(self, pending):
        """Look at the machine before anything is downloaded."""
        supported = STACKS[self.stack]['pythons']
        existing = None
        if self.venv.exists() and any(self.venv.iterdir()):
            if not ((self.venv / 'pyvenv.cfg').is_file() or self.state.is_dir()):
                raise SetupError(
                    f'{self.venv} exists and is not a virtual '
                    'environment. Remove it or choose another '
                    'folder with --venv.'
                )
            existing = probe(self.python) if self.python.exists() else None
            if existing and existing['version'] not in supported:
                raise SetupError(
                    f'{self.venv} is an environment of Python '
                    f'{existing["version"]}, but this stack needs one of '
                    f'{", ".join(sorted(supported))}. Remove it (rm -r '
                    f'{self.venv}) and run the same command again.'
                )
        self.base_python = existing or find_python(supported)
        if not existing and not self.base_python['venv']:
            version = self.base_python['version']
            raise SetupError(
                f'{self.base_python["executable"]} cannot create virtual '
                'environments (venv or ensurepip is missing).\nInstall them, '
                + package_hint(
                    f'sudo apt install python{version}-venv',
                    f'sudo dnf install python{version}',
                    f'brew install python@{version}',
                )
            )
        if 'mmcv' in pending and not self.mmcv_wheel:
            self.compiler = find_compiler(self.base_python)
        disk = STACKS[self.stack]['disk']
        check_disk(self.venv, disk if 'torch' in pending else 2 if 'mmcv' in pending else 1)

    def make(self):
        """Do what is to be done. Raises SetupError."""
        if not self.pending():
            return False
        self.check(self.pending())
        self.state.mkdir(parents=True, exist_ok=True)
        with self.locked():
            pending = self.pending()
            steps = self.steps()
            for number, (name, title, method) in enumerate(steps, 1):
                if name not in pending:
                    continue
                print(f'[{number}/{len(steps)}] {title} ...', flush=True)
                stamp = self.state / f'{name}.done'
                for path in (stamp, self.log(name)):
                    if path.exists():
                        path.unlink()
                start = time.monotonic()
                try:
                    method()
                except subprocess.CalledProcessError as error:
                    version = self.base_python['version']
                    advice = dict(
                        venv=self.venv,
                        disk=STACKS[self.stack]['disk'],
                        headers=headers_hint(version),
                        pythons=', '.join(sorted(STACKS[self.stack]['pythons'])),
                    )
                    raise SetupError(
                        f'Step [{number}/{len(steps)}] failed: {title} (exit '
                        f'status {error.returncode}, after '
                        f'{clock(time.monotonic() - start)}).\n'
                        + explain(error, self.log(name), advice)
                    ) from None
                stamp.write_text(self.keys[name])
                print(f'      done in {clock(time.monotonic() - start)}', flush=True)
        return bool(pending)

    @contextlib.contextmanager
    def locked(self):
        """Keep a second run (another terminal) out until this one is done."""
        import fcntl

        with open(self.state / 'lock', 'w') as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                print(f'Another run is setting up {self.venv}: waiting for it ...', flush=True)
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def uv(self, step, *arguments):
        run(
            [self.python, '-m', 'uv', 'pip', 'install', '--python', self.python, *arguments],
            self.log(step),
        )

    def pin_file(self, part):
        path = self.state / f'{part}.txt'
        path.write_text('\n'.join(self.pins[part]) + '\n')
        return path

    def make_venv(self):
        log = self.log('venv')
        run([self.base_python['executable'], '-m', 'venv', self.venv], log)
        # uv, because pip may prefer a local CPU build of torch that does not
        # fit the registry's torchvision.
        run([self.python, '-m', 'pip', 'install', *self.pins['uv']], log)

    def install_torch(self):
        names = '\n'.join(
            p for p in self.pins['base'] if normalize(re.match(r'[\w.-]+', p)[0]) in BASE
        )
        wanted = self.state / 'wanted.txt'
        wanted.write_text(names + '\n')
        self.uv('torch', '-r', wanted, '-c', self.pin_file('base'), '-c', self.pin_file('rest'))

    def install_mmcv(self):
        wheel = self.mmcv_wheel or self.compile_mmcv()
        self.uv('mmcv', '--no-deps', '--reinstall', wheel)

    def compile_mmcv(self):
        """Compile mmcv; returns the wheel's path.

        The folder is named after the torch that it is compiled for, so that a
        build for another torch is never taken, and object files of an
        interrupted build are.
        """
        folder = self.state / f'mmcv-{self.keys["mmcv"][:12]}'
        wheels = list(folder.glob('*.whl'))
        if wheels:
            return wheels[0]
        for old in self.state.glob('mmcv-*/'):
            if old != folder:
                shutil.rmtree(old)
        log, name = self.log('mmcv'), STACKS[self.stack]['mmcv']
        pip = [self.python, '-m', 'pip']
        build = ['--no-build-isolation', '--no-deps', '--no-cache-dir']
        source = folder / 'source'
        if not source.is_dir():
            unpacked = folder / 'unpacked'
            shutil.rmtree(folder, ignore_errors=True)
            unpacked.mkdir(parents=True)
            run(
                [*pip, 'download', *build, '--no-binary', name, '-d', folder, *self.pins['mmcv']],
                log,
            )
            with tarfile.open(next(folder.glob('*.tar.gz'))) as archive:
                archive.extractall(unpacked)
            next(unpacked.iterdir()).rename(source)
        extra = self.cuda_env()
        extra.update(
            MMCV_WITH_OPS='1',
            MAX_JOBS=str(compile_jobs()),
            CXX=' '.join(self.compiler),
            PYTHONUNBUFFERED='1',
            # Python's own flags (older versions of setuptools add to them,
            # newer ones replace them), but without debug symbols, which take
            # a third of the time.
            CFLAGS='-DNDEBUG -fwrapv -O3 -g0 ' + os.environ.get('CFLAGS', ''),
        )
        run([*pip, 'wheel', '-v', *build, '-w', folder / 'wheel', source], log, **extra)
        built = next((folder / 'wheel').glob('*.whl'))
        wheel = folder / built.name
        built.rename(wheel)
        for done in (source, source.parent / 'unpacked', built.parent):
            shutil.rmtree(done)
        print(f'      kept for other machines (MMCV_WHEEL=...): {wheel}')
        return wheel

    def cuda_env(self):
        """Environment variables that choose CUDA or CPU operators."""
        if os.environ.get('FORCE_CUDA') == '1':
            return {}
        output = run(
            [
                self.python,
                '-c',
                'import torch; print("cuda", torch.version.cuda, torch.cuda.is_available())',
            ],
            self.log('mmcv'),
        )
        version, available = re.search(r'cuda (\S+) (\S+)', output).groups()
        if available != 'True' or version == 'None':
            return {}
        toolkit = cuda_toolkit()
        if toolkit and toolkit.split('.')[0] == version.split('.')[0]:
            print(
                f'      with CUDA operators (nvcc {toolkit}); this takes several times longer',
                flush=True,
            )
            return {}
        found = f'nvcc {toolkit} does not fit' if toolkit else 'nvcc is missing'
        print(f'      for the CPU only: PyTorch uses CUDA {version} and {found}', flush=True)
        return dict(CUDA_VISIBLE_DEVICES='')

    def install_packages(self):
        # The list is complete; resolving again would bring in
        # opencv-python, which needs libGL, beside the headless one.
        self.uv('packages', '--no-deps', '-r', self.pin_file('rest'))

    def install_plugin(self):
        self.uv('plugin', '--no-deps', '--no-build-isolation', '-e', ROOT)

    def verify(self):
        with tempfile.TemporaryDirectory() as folder:
            output = run(
                [self.python, '-W', 'ignore', '-c', VERIFY], self.log('verify'), cwd=folder
            )
        lines = output.splitlines()
        print('      ' + ', '.join(line for line in lines if re.fullmatch(r'\w+ \d[\w.+]*', line)))
        hide = 'hide the GPU' in lines
        if hide:
            print(
                '      NOTE: mmcv has no CUDA operators, and without them '
                'detectors cannot run on the\n      GPU: `make demo` and '
                '`make test` use the CPU. See "When the install fails" in README.md.'
            )
        # What the Makefile puts before the commands that it runs.
        (self.state / 'run-env').write_text('CUDA_VISIBLE_DEVICES=\n' if hide else '')


def main():
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--stack', choices=sorted(STACKS), default='onedl')
    parser.add_argument(
        '--venv', type=Path, default=ROOT / '.venv', help='folder of the environment'
    )
    parser.add_argument(
        '--mmcv-wheel',
        type=Path,
        default=os.environ.get('MMCV_WHEEL') or None,
        help='a wheel of mmcv, compiled earlier for the same Python and '
        'PyTorch, to use instead of compiling (or set MMCV_WHEEL)',
    )
    args = parser.parse_args()

    def interrupt(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)
    try:
        wheel = args.mmcv_wheel
        if wheel and not wheel.is_file():
            raise SetupError(f'The mmcv wheel {wheel} does not exist.')
        environment = Environment(args.stack, args.venv.absolute(), wheel and wheel.absolute())
        if environment.make():
            print(f'The environment {args.venv} is ready.')
    except KeyboardInterrupt:
        print('\nInterrupted. Run the same command again to go on from here.', file=sys.stderr)
        return 130
    except (SetupError, OSError) as error:
        print(f'\nThe set-up of {args.venv} failed.\n{error}', file=sys.stderr)
        return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())
