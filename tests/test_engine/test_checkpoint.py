"""Trainings that are killed, and go on."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import repa_mm
from repa_mm.reparam import CheckpointError
from repa_mm.weights import find_latest, load_checkpoint

from ..test_tools.conftest import digits  # noqa: F401
from .toy import make_runner

ROOT = Path(__file__).parents[2]
CONFIG = dict(
    default_hooks=dict(
        checkpoint=dict(
            type='SafeCheckpointHook',
            interval=1,
            max_keep_ckpts=1,
            save_best='mean',
            rule='greater',
        )
    ),
    train_cfg=dict(by_epoch=True, max_epochs=4, val_interval=1),
    optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1, momentum=0.9)),
    randomness=dict(seed=0),
)

# Where the third epoch's checkpoint is being made.
KILLED = """
import os, signal, sys
from unittest import mock
from tests.test_engine.test_checkpoint import CONFIG
from tests.test_engine.toy import make_runner

def at_third(function):
    def wrapped(*args, **kwargs):
        if any('epoch_3' in str(a) for a in args):
            die()
        return function(*args, **kwargs)
    return wrapped

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

work_dir, where = sys.argv[1:]
runner = make_runner(work_dir, **CONFIG)
if where == 'writing':
    real = open
    class Half:
        def __init__(self, file): self.file = file
        def __enter__(self): return self
        def __exit__(self, *args): pass
        def write(self, data):
            self.file.write(data[:len(data) // 2])
            self.file.flush()
            die()
    import builtins
    def opened(path, mode='r', *args, **kwargs):
        file = real(path, mode, *args, **kwargs)
        return Half(file) if 'w' in mode and 'epoch_3' in str(path) else file
    builtins.open = opened
elif where == 'renaming':
    os.replace = at_third(os.replace)
elif where == 'pointing':
    real = open
    import builtins
    def opened(path, *args, **kwargs):
        if str(path).endswith('last_checkpoint') and runner.epoch == 2:
            die()
        return real(path, *args, **kwargs)
    builtins.open = opened
elif where == 'removing':
    remove = os.remove
    os.remove = lambda path: die() if 'epoch_2' in path else remove(path)
runner.train()
"""


def weights_of(path):
    return load_checkpoint(str(path))['state_dict']


@pytest.fixture
def one_thread():
    """Sums of several threads are not always the same."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize('where', ['writing', 'renaming', 'pointing', 'removing'])
def test_killed_while_saving(where, tmp_path, one_thread):
    work_dir = tmp_path / 'killed'
    result = subprocess.run(
        [sys.executable, '-c', KILLED, str(work_dir), where],
        cwd=ROOT,
        env=dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1'),
    )
    assert result.returncode == -signal.SIGKILL
    files = {p.name for p in work_dir.glob('*.pth')}
    is_complete = where in ('pointing', 'removing')
    assert ('epoch_3.pth' in files) == is_complete
    assert 'epoch_2.pth' in files
    for name in files:
        weights_of(work_dir / name)

    whole = make_runner(tmp_path / 'whole', **CONFIG)
    whole.train()
    latest, _ = find_latest(str(work_dir))
    assert latest.endswith('epoch_3.pth' if is_complete else 'epoch_2.pth')
    resumed = make_runner(work_dir, load_from=latest, resume=True, **CONFIG)
    resumed.train()
    expected = weights_of(tmp_path / 'whole/epoch_4.pth')
    actual = weights_of(work_dir / 'epoch_4.pth')
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    # What the killed process left is written over, removed, or a whole checkpoint.
    left = {p.name for p in work_dir.glob('epoch_*.pth')}
    assert left <= {'epoch_4.pth', 'epoch_2.pth'}
    assert len(list(work_dir.glob('best_*.pth'))) == 1
    assert not list(work_dir.glob('.*'))


def test_two_trainings_in_one_folder(tmp_path, monkeypatch):
    """Each writes its own files, and what has a checkpoint's name is always whole."""
    first, second = (make_runner(tmp_path, **CONFIG) for _ in range(2))
    fsync = os.fsync

    def train_the_second(handle):
        monkeypatch.setattr(os, 'fsync', fsync)
        second.train()
        for path in tmp_path.glob('*.pth'):
            weights_of(path)
        fsync(handle)

    # While the first writes its first file.
    monkeypatch.setattr(os, 'fsync', train_the_second)
    first.train()
    assert second.epoch == first.epoch == 4
    weights_of(tmp_path / 'epoch_4.pth')
    assert not list(tmp_path.glob('.*'))


def test_find_latest(tmp_path):
    def latest():
        path, checkpoint = find_latest(str(tmp_path))
        assert checkpoint['state_dict'].keys() == {'a'}
        return Path(path).name

    assert find_latest(str(tmp_path / 'none')) is None
    assert find_latest(str(tmp_path)) is None
    for step in (9, 10):
        torch.save(dict(a=torch.ones(step)), tmp_path / f'epoch_{step}.pth')
    pointer = tmp_path / 'last_checkpoint'
    newest = tmp_path / 'epoch_10.pth'
    assert latest() == 'epoch_10.pth'
    for text in ('', '/moved/from/epoch_10.pth', str(newest), '/gone/epoch_11.pth'):
        pointer.write_text(text)
        assert latest() == 'epoch_10.pth'
    pointer.write_text(str(tmp_path / 'epoch_9.pth'))
    # A training that began anew at epoch 8 has not come to epoch 10 yet.
    written = pointer.stat().st_mtime
    os.utime(newest, (written - 60, written - 60))
    assert latest() == 'epoch_9.pth'
    # A training was killed after it wrote epoch 10, and before it said so.
    os.utime(newest, (written + 60, written + 60))
    assert latest() == 'epoch_10.pth'
    data = newest.read_bytes()
    newest.write_bytes(data[: len(data) // 2])
    os.utime(newest, (written + 60, written + 60))
    assert latest() == 'epoch_9.pth'
    (tmp_path / 'epoch_9.pth').write_bytes(b'')
    with pytest.raises(CheckpointError, match='nothing to resume from'):
        find_latest(str(tmp_path))
    pointer.write_text('s3://bucket/epoch_9.pth')
    assert find_latest(str(tmp_path)) == ('s3://bucket/epoch_9.pth', None)


def test_user_backend_is_kept(tmp_path):
    config = dict(
        CONFIG,
        default_hooks=dict(
            checkpoint=dict(
                type='SafeCheckpointHook', interval=1, backend_args=dict(backend='local')
            )
        ),
    )
    runner = make_runner(tmp_path, **config)
    runner.train()
    (hook,) = (h for h in runner.hooks if type(h).__name__ == 'SafeCheckpointHook')
    assert hook.backend_args == dict(backend='local')
    assert len(list(tmp_path.glob('epoch_*.pth'))) == 4


@pytest.mark.slow
@pytest.mark.parametrize('task', ['retinanet', 'upernet'])
def test_killed_at_any_moment(task, digits, tmp_path):  # noqa: F811
    """The demonstration's training, killed three times, ends the same."""
    pytest.importorskip('mmseg' if task == 'upernet' else 'mmdet')
    options = dict(
        retinanet=['train_cfg.max_epochs=4', 'train_cfg.val_interval=2'],
        upernet=[
            'train_cfg.max_iters=12',
            'train_cfg.val_interval=4',
            'default_hooks.checkpoint.interval=2',
        ],
    )[task]
    options += [
        'train_dataloader.batch_size=4',
        'default_hooks.checkpoint.max_keep_ckpts=1',
        'default_hooks.logger.interval=1',
    ]
    name = 'epoch_4.pth' if task == 'retinanet' else 'iter_12.pth'

    def train(work_dir, *more):
        return subprocess.Popen(
            [
                sys.executable,
                str(ROOT / 'tools/train.py'),
                repa_mm.config_path(f'demo/{task}_repa_swin_digits.py'),
                '--work-dir',
                str(work_dir),
                *more,
                '--cfg-options',
                *options,
            ],
            cwd=digits,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1'),
        )

    start = time.time()
    process = train(tmp_path / 'whole')
    assert process.wait() == 0, process.stderr.read()[-3000:]
    seconds = time.time() - start
    work_dir = tmp_path / 'killed'
    moments = [random.uniform(0.3, 1) * seconds for _ in range(3)]
    for moment in moments:
        process = train(work_dir, '--resume')
        try:
            process.wait(timeout=moment)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for path in work_dir.glob('*.pth'):
            weights_of(path)
    process = train(work_dir, '--resume')
    assert process.wait() == 0, (moments, process.stderr.read()[-3000:])
    expected = weights_of(tmp_path / 'whole' / name)
    actual = weights_of(work_dir / name)
    assert all(torch.equal(actual[k], expected[k]) for k in expected), moments
