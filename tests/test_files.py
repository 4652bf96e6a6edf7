"""Files are written whole or not at all."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from repa_mm.files import check_writable, replacing, write_bytes
from repa_mm.weights import save_checkpoint

ROOT = Path(__file__).parents[1]
pytest.importorskip('fcntl')

WRITING = """
import sys
from pathlib import Path
from repa_mm.files import replacing
with replacing(sys.argv[1]) as temporary:
    Path(temporary).write_bytes(bytes(1000))
    print('writing', flush=True)
    sys.stdin.read()
"""


def start_writing(path):
    process = subprocess.Popen(
        [sys.executable, '-c', WRITING, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        text=True,
    )
    assert process.stdout.readline() == 'writing\n'
    return process


@pytest.fixture
def full_disk():
    """No file grows beyond a kilobyte."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_two_writers_of_one_file(tmp_path):
    out = tmp_path / 'out.bin'
    with replacing(str(out)) as first:
        Path(first).write_text('first')
        write_bytes(str(out), b'second')
        assert out.read_text() == 'second'
        assert Path(first).read_text() == 'first'
    assert out.read_text() == 'first'
    assert os.listdir(tmp_path) == ['out.bin']


@pytest.mark.parametrize(
    'next_run',
    [lambda folder: write_bytes(str(folder / 'other'), b''), lambda f: check_writable(str(f))],
)
def test_what_a_kill_leaves_is_removed_by_the_next_run(next_run, tmp_path):
    killed, living = (start_writing(tmp_path / 'epoch_1.pth') for _ in range(2))
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 2
    next_run(tmp_path)
    assert len([name for name in os.listdir(tmp_path) if name != 'other']) == 1
    living.communicate()
    assert living.returncode == 0
    assert (tmp_path / 'epoch_1.pth').read_bytes() == bytes(1000)
    assert set(os.listdir(tmp_path)) <= {'epoch_1.pth', 'other'}


def test_full_disk(tmp_path, full_disk):
    out = tmp_path / 'out.pth'
    out.write_text('old')
    for write in (
        lambda: write_bytes(str(out), bytes(2000)),
        lambda: save_checkpoint(dict(a=torch.zeros(1000)), str(out)),
    ):
        with pytest.raises(OSError, match=f"^cannot write '{out}': File too large$"):
            write()
    assert out.read_text() == 'old'
    assert os.listdir(tmp_path) == ['out.pth']


def test_errors_of_other_files_name_those(tmp_path):
    with pytest.raises(FileNotFoundError, match='none.txt'):
        with replacing(str(tmp_path / 'out')):
            open(tmp_path / 'none.txt')
    assert not os.listdir(tmp_path)
