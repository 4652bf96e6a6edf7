"""Set up an environment with one of the two pinned stacks.

    python3 requirements/setup_env.py --stack onedl --venv .venv

The script installs uv, and uv creates the environment and installs PyTorch. Then the script
compiles MMCV against that PyTorch, installs the other pinned packages and this project, and
verifies that they work together. A run after a failure goes on where that one ended: uv leaves
alone what is installed, and MMCV is compiled once. The script needs only Python's standard
library. ``make env`` calls it.
"""

import argparse
import contextlib
import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# For each stack MMCV's distribution and the Pythons that all packages have wheels for.
STACKS = {
    'onedl': ('onedl-mmcv', ('3.10', '3.11', '3.12')),
    'openmmlab': ('mmcv', ('3.10', '3.11')),
}
# MMCV is compiled against and with these, so they come first.
BASE = ('torch', 'torchvision', 'setuptools', 'wheel', 'ninja', 'numpy')
DISK_GB = 7  # the environment, and the downloads and object files beside it
COMPILE_GB = 2  # memory of one compiler process on MMCV's largest files
COMPILE_CORE_MINUTES = 16  # time of one core of an ordinary machine to compile MMCV
COMPILER = 'on Debian/Ubuntu: sudo apt install build-essential; on Fedora: sudo dnf install gcc-c++'
PROBE = '#include <Python.h>\n#include <optional>\nstd::optional<int> number;\n'

CUDA = """
import subprocess, torch
from torch.utils.cpp_extension import CUDA_HOME
if torch.cuda.is_available() and torch.version.cuda:
    nvcc = subprocess.getoutput(f'"{CUDA_HOME}/bin/nvcc" --version')
    fits = f'release {torch.version.cuda.partition(".")[0]}.' in nvcc
    print(torch.version.cuda, 'compile' if fits else 'hide')
"""

VERIFY = """
import torch, torchvision, mmengine, mmcv
import mmcv._ext, mmcv.ops
import mmdet.models, mmseg.models, mmpretrain.models, repa_mm
boxes = torch.tensor([[0., 0., 2., 2.], [0., 0., 2., 1.9], [5., 5., 6., 6.]])
kept = mmcv.ops.nms(boxes, torch.tensor([.9, .8, .7]), 0.5)[1].tolist()
assert kept == [0, 2], f'mmcv.ops.nms keeps {kept} instead of [0, 2]'
for module in (torch, torchvision, mmengine, mmcv, mmdet, mmseg, mmpretrain, repa_mm):
    print(f'{module.__name__} {module.__version__}')
if torch.cuda.is_available() and mmcv.ops.get_compiling_cuda_version() == 'not available':
    print('hide the GPU')
"""

# What the output of a failed step says -> what to do about it.
REMEDIES = {
    'No space left on device|Disk quota exceeded|os error 28': f'The disk is full. Free some '
    f'space (the whole stack needs about {DISK_GB} GB, and uv keeps its downloads in '
    '~/.cache/uv) and run the same command again.',
    'Killed signal|signal terminated program|cannot allocate memory|out of memory|MemoryError': (
        'The compiler ran out of memory. Run again with fewer compiler processes at a time: '
        'MAX_JOBS=1 make ...'
    ),
    r'probe\.cpp': f'The C++ compiler is too old. Install GCC 9 or later, {COMPILER}',
    'No interpreter found': 'This stack needs Python {pythons}. Install one of them and name it: '
    'make ... PYTHON=/path/to/python3.11',
    r'name resolution|resolve host|lookup address|dns error|Network is unreachable|'
    r'Connection refused|Connection reset|error sending request|timed out|CERTIFICATE_VERIFY|'
    r'invalid peer certificate|NewConnectionError|ProxyError|\(Connect\)|tunnel error': (
        'The network or the package index could not be reached. Check the connection; behind a '
        'proxy set HTTPS_PROXY; where an own certificate authority is in use set SSL_CERT_FILE '
        'and UV_SYSTEM_CERTS=1. Then run the same command again: what is already installed stays.'
    ),
    'No matching distribution|No solution found|not found in the package registry|'
    'has no wheels with a matching': 'The package index does not offer a pinned package for this '
    'Python and platform. Supported are Python {pythons} on 64-bit Linux; if a mirror is set '
    '(pip.conf, UV_INDEX_URL), check that it is up to date.',
    'CUDA_HOME|nvcc|detected CUDA version': 'The CUDA toolkit does not fit PyTorch. To compile '
    'the operators for the CPU only: CUDA_VISIBLE_DEVICES= FORCE_CUDA=0 make ...',
    'Permission denied': 'A file could not be written. Was an earlier run made by another user '
    '(sudo)? Then remove {venv} and run the same command again.',
    '': 'Running the same command again repeats this step only. If it keeps failing, remove '
    '{venv} and start anew.',
}


class SetupError(Exception):
    """A step failed; the message says why and what to do."""


def check_disk(*paths):
    """Check that there is room for the environment and for downloads. Raises SetupError."""
    for path in paths:
        place = next(p for p in (path, *path.parents) if p.exists())
        free = shutil.disk_usage(place).free / 1e9
        if free < DISK_GB:
            raise SetupError(
                f'Too little disk space for {path}: about {DISK_GB} GB are needed, {free:.1f} GB '
                'are free.\nFree some space, or set UV_CACHE_DIR to a folder on another disk.'
            )


def compile_jobs():
    """Number of compiler processes at a time: one for each core, as far as memory allows."""
    if os.environ.get('MAX_JOBS'):
        return max(1, int(os.environ['MAX_JOBS']))
    limits = [len(os.sched_getaffinity(0)) * COMPILE_GB * 1e9]
    # The files are not everywhere, and that of a container without a limit says "max".
    with contextlib.suppress(OSError, ValueError):
        meminfo = Path('/proc/meminfo').read_text()
        limits.append(1024 * int(re.search(r'MemAvailable:\s+(\d+)', meminfo)[1]))
        limits.append(int(Path('/sys/fs/cgroup/memory.max').read_text()))
    return max(1, int(min(limits) / (COMPILE_GB * 1e9)))


def clock(start):
    """The time since a moment as minutes:seconds."""
    return '{}:{:02d}'.format(*divmod(int(time.monotonic() - start), 60))


def progress(output):
    """What a command does now: how many files it has compiled, else its last line."""
    counted = re.findall(r'\[(\d+)/(\d+)\] ', output)
    if counted:
        return '{} of {} files compiled'.format(*counted[-1])
    return output.strip().rpartition('\n')[2].strip()


def run(command, log, cwd=None, **extra_env):
    """Run a command, write its output to a log, and show that it moves.

    Returns the output. Raises subprocess.CalledProcessError.
    """
    command, tty, start = list(map(str, command)), sys.stdout.isatty(), time.monotonic()
    # On a terminal a line takes the place of the line before it.
    line = '\r\033[K{:.78}' if tty else '{:.120}\n'
    env = {k: v for k, v in os.environ.items() if k not in ('PYTHONPATH', 'PYTHONHOME')}
    env.update(extra_env)
    null, out = subprocess.DEVNULL, subprocess.STDOUT
    with open(log, 'ab') as file:
        file.write(f'$ {shlex.join(command)}\n'.encode())
        file.flush()
        begin = file.tell()
        with subprocess.Popen(command, stdin=null, stdout=file, stderr=out, cwd=cwd, env=env) as p:
            while p.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    p.wait(1 if tty else 20)
                    break
                moved = progress(log.read_bytes()[begin:].decode(errors='replace'))
                print(line.format(f'      {clock(start)}  {moved}'), end='', flush=True)
    print('\r\033[K' if tty else '', end='', flush=True)
    output = log.read_bytes()[begin:].decode(errors='replace')
    if p.returncode:
        raise subprocess.CalledProcessError(p.returncode, command, output)
    return output


def explain(output, log, **advice):
    """The end of a failed command's output, the name of its log, and what to do."""
    lines = [line.rstrip()[:200] for line in output.splitlines()]
    shown = [line for line in lines if re.search(r'\berror\b', line, re.I)][:5]
    shown += [line for line in lines[-12:] if line not in shown]
    # Only the end tells the reason: a compiler's output is long and mentions much.
    end = '\n'.join(shown + lines[-40:])
    what = next(text for pattern, text in REMEDIES.items() if re.search(pattern, end, re.I))
    shown = ''.join(f'      {line}\n' for line in shown)
    return f'{shown}      whole log: {log}\nWhat to do: {what.format(**advice)}'


class Environment:
    """One environment and the steps that lead to it.

    Args:
        stack (str): 'onedl' or 'openmmlab'.
        venv (Path): The environment's folder.
        wheel (Path, optional): A compiled MMCV to use.
    """

    def __init__(self, stack, venv, wheel=None):
        self.venv, self.state, self.python = venv, venv / '.setup', venv / 'bin' / 'python'
        self.uv = self.state / 'uv' / 'bin' / 'uv'
        self.requirements = ROOT / 'requirements' / f'{stack}.txt'
        name, self.pythons = STACKS[stack]
        self.mmcv = self.pin(name)
        if wheel and not wheel.name.startswith(self.mmcv.replace('-', '_').replace('==', '-')):
            raise SetupError(f'This stack needs a wheel of {self.mmcv}; {wheel} is another.')
        # MMCV fits only the PyTorch that it was compiled against.
        self.folder = self.state / f'{self.mmcv}-{self.pin("torch")}'.replace('==', '-')
        self.wheel = wheel or next(self.folder.glob('*.whl'), None)
        files = (self.requirements, Path(__file__), ROOT / 'setup.py', ROOT / 'repa_mm/version.py')
        self.inputs = '\n'.join([str(ROOT), *(file.read_text() for file in files)])

    def pin(self, name):
        """The pinned version of a package, 'name==version'."""
        return re.search(f'^{name}==\\S+', self.requirements.read_text(), re.M)[0]

    def is_ready(self):
        """Whether an earlier run made the environment of just these inputs."""
        stamp = self.state / 'done'
        return self.python.exists() and stamp.is_file() and stamp.read_text() == self.inputs

    def make(self):
        """Do all steps, unless the environment is ready. Raises SetupError."""
        if self.is_ready():
            return
        if not self.python.exists():
            if self.venv.exists() and not self.state.is_dir():
                raise SetupError(
                    f'{self.venv} exists and is not a virtual environment. Remove it or choose '
                    'another folder with --venv.'
                )
            caches = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache')
            check_disk(self.venv, Path(os.environ.get('UV_CACHE_DIR') or caches / 'uv'))
        self.state.mkdir(parents=True, exist_ok=True)
        with open(self.state / 'lock', 'w') as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                print(f'Another run is setting up {self.venv}: waiting for it ...', flush=True)
                fcntl.flock(file, fcntl.LOCK_EX)
            steps = self.steps()
            for number, (method, title) in enumerate(steps.items(), 1):
                self.step(f'[{number}/{len(steps)}]', title, method)
            (self.state / 'done').write_text(self.inputs)
        print(f'The environment {self.venv} is ready.')

    def steps(self):
        """The methods of all steps, in their order, and their titles."""
        jobs = compile_jobs()
        minutes = max(1, round(COMPILE_CORE_MINUTES / jobs))
        mmcv = f'compiling {self.mmcv} (about {minutes} minutes with {jobs} compiler processes)'
        if self.wheel:
            mmcv = f'installing {self.mmcv} from {self.wheel.name}'
        return {
            self.create: f'creating {self.venv}',
            self.try_compiler: 'trying the C++ compiler',
            self.install_torch: f'installing {self.pin("torch")} (a download of up to 3 GB)',
            self.install_mmcv: mmcv,
            self.install_packages: 'installing the other packages',
            self.install_plugin: 'installing RePa-MM itself (editable)',
            self.verify: 'verifying that everything imports',
        }

    def step(self, number, title, method):
        """Do one step. Raises SetupError."""
        print(f'{number} {title} ...', flush=True)
        self.log, start = self.state / f'{method.__name__}.log', time.monotonic()
        self.log.unlink(missing_ok=True)
        try:
            method()
        except subprocess.CalledProcessError as error:
            advice = dict(venv=self.venv, pythons=', '.join(self.pythons))
            raise SetupError(
                f'Step {number} failed: {title} (exit status {error.returncode}, after '
                f'{clock(start)}).\n{explain(error.output, self.log, **advice)}'
            ) from None
        print(f'      done in {clock(start)}', flush=True)

    def run(self, *command, **options):
        """Run a command with the log of this step."""
        return run(command, self.log, **options)

    def install(self, *arguments):
        """Install packages with uv."""
        self.run(self.uv, 'pip', 'install', '--python', self.python, *arguments)

    def create(self):
        """Install uv beside the environment, and let uv create the environment."""
        if not self.uv.exists():
            self.run(sys.executable, '-m', 'venv', '--clear', self.state / 'uv')
        self.run(self.uv.parent / 'python', '-m', 'pip', 'install', self.pin('uv'))
        if not self.python.with_name('pip').exists():  # the last thing that uv puts there
            this = '.'.join(map(str, sys.version_info[:2]))
            others = f'>={self.pythons[0]},<={self.pythons[-1]}.999'
            python = sys.executable if this in self.pythons else others
            options = ('--seed', '--allow-existing', '--no-python-downloads', '--python', python)
            self.run(self.uv, 'venv', *options, self.venv)

    def try_compiler(self):
        """Compile a small C++17 file that includes Python.h, before the long downloads."""
        if self.wheel:
            return
        compiler, source = shlex.split(os.environ.get('CXX') or 'c++'), self.state / 'probe.cpp'
        if not shutil.which(compiler[0]):
            raise SetupError(
                f'No C++ compiler found ({compiler[0]!r}): mmcv has to be compiled.\n'
                f'Install one, {COMPILER}'
            )
        query = 'import sysconfig; print(sysconfig.get_path("include"))'
        include = Path(self.run(self.python, '-c', query).strip())
        if not (include / 'Python.h').is_file():
            raise SetupError(
                f'{self.python} has no C headers ({include}/Python.h is missing), and mmcv is '
                'compiled against them.\nInstall them, on Debian/Ubuntu: sudo apt install '
                f'{include.name}-dev; on Fedora: sudo dnf install {include.name}-devel'
            )
        source.write_text(PROBE)
        self.run(*compiler, '-std=c++17', '-fsyntax-only', f'-I{include}', source)

    def install_torch(self):
        """Install PyTorch and the tools to compile MMCV with."""
        self.install(*BASE, '-c', self.requirements)

    def install_mmcv(self):
        """Install the MMCV that was given or kept, else compile it."""
        self.folder.mkdir(exist_ok=True)
        if not self.wheel:
            self.wheel = self.compile_mmcv()
        elif self.wheel.parent != self.folder:
            self.wheel = Path(shutil.copy(self.wheel, self.folder))
        self.install('--no-deps', self.wheel)

    def compile_mmcv(self):
        """Compile MMCV, with the object files of an interrupted run; returns the wheel's path."""
        pip = (self.python, '-m', 'pip')
        build = ('--no-build-isolation', '--no-deps', '--no-cache-dir')
        source, unpacked = self.folder / 'source', self.folder / 'unpacked'
        if not source.is_dir():
            name = self.mmcv.partition('==')[0]
            self.run(*pip, 'download', *build, '--no-binary', name, '-d', self.folder, self.mmcv)
            shutil.unpack_archive(next(self.folder.glob('*.tar.gz')), unpacked)
            next(unpacked.iterdir()).rename(source)
        # Python's own flags (older versions of setuptools add to them, newer versions replace
        # them) without debug symbols, which take a third of the time.
        flags = '-DNDEBUG -fwrapv -O3 -g0 ' + os.environ.get('CFLAGS', '')
        env = dict(MMCV_WITH_OPS='1', MAX_JOBS=str(compile_jobs()), CFLAGS=flags)
        env.update(self.cuda_env(), PYTHONUNBUFFERED='1')
        self.run(*pip, 'wheel', '-v', *build, '-w', unpacked, source, **env)
        built = next(unpacked.glob('*.whl'))
        wheel = built.rename(self.folder / built.name)
        shutil.rmtree(source)
        print(f'      kept for other machines (MMCV_WHEEL=...): {wheel}')
        return wheel

    def cuda_env(self):
        """Environment variables that choose operators for CUDA or for the CPU."""
        if os.environ.get('FORCE_CUDA') == '1':
            return {}
        version, _, choice = self.run(self.python, '-c', CUDA).strip().partition(' ')
        if choice == 'compile':
            print('      with CUDA operators: this takes several times longer', flush=True)
        if choice == 'hide':
            print(f'      for the CPU only: there is no nvcc for CUDA {version}', flush=True)
        return dict(CUDA_VISIBLE_DEVICES='') if choice == 'hide' else {}

    def install_packages(self):
        """Install all other pins."""
        # The list is complete. Resolving it anew would bring in opencv-python, which needs libGL.
        self.install('--no-deps', '-r', self.requirements)

    def install_plugin(self):
        """Install this project in such a way that changes of its files take effect."""
        self.install('--no-deps', '--no-build-isolation', '-e', ROOT)

    def verify(self):
        """Import everything, and note whether a GPU must be hidden from MMCV."""
        with tempfile.TemporaryDirectory() as folder:
            output = self.run(self.python, '-W', 'ignore', '-c', VERIFY, cwd=folder)
        print('      ' + ', '.join(re.findall(r'^\w+ \d[\w.+]*$', output, re.M)))
        hide = 'hide the GPU' in output
        if hide:
            print(
                '      NOTE: mmcv has no CUDA operators, and without them detectors cannot run on '
                'the\n      GPU: `make demo` and `make test` use the CPU. See "When the install '
                'fails" in docs/install.md.'
            )
        # The Makefile puts this before the commands that it runs.
        (self.state / 'run-env').write_text('CUDA_VISIBLE_DEVICES=\n' if hide else '')


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--stack', choices=sorted(STACKS), default='onedl')
    parser.add_argument('--venv', type=Path, default=ROOT / '.venv', help='the environment')
    parser.add_argument(
        '--mmcv-wheel',
        type=Path,
        default=os.environ.get('MMCV_WHEEL') or None,
        help='one compiled earlier for the same Python and PyTorch (or set MMCV_WHEEL)',
    )
    args = parser.parse_args()
    try:
        wheel = args.mmcv_wheel
        if wheel and not wheel.is_file():
            raise SetupError(f'The mmcv wheel {wheel} does not exist.')
        Environment(args.stack, args.venv.absolute(), wheel and wheel.absolute()).make()
    except KeyboardInterrupt:
        sys.exit('\nInterrupted. Run the same command again to go on from here.')
    except (SetupError, OSError) as error:
        sys.exit(f'\nThe set-up of {args.venv} failed.\n{error}')


if __name__ == '__main__':
    main()
