"""Train, test in both forms, merge, test again, draw: as a user does."""

import os
import pickle
import subprocess
import sys
from functools import cache

import cv2
import numpy as np
import pytest
import torch

from repa_mm.io.command_line import codebase_tool
from tests.test_export.conftest import write_config

from .conftest import ROOT

EPOCH = {'train_cfg.max_epochs': 1, 'train_cfg.val_interval': 1}
SHORT = {
    'retinanet': {**EPOCH, 'model.test_cfg.score_thr': 0.0},
    'mask_rcnn': {**EPOCH, 'model.test_cfg.rcnn.score_thr': 0.0},
    'upernet': {
        'train_cfg.max_iters': 2, 'train_cfg.val_interval': 2,
        'default_hooks.checkpoint.interval': 2,
    },
}  # fmt: skip


def arguments(task, work_dir, **more):
    options = {
        **SHORT[task],
        'train_dataloader.batch_size': 4,
        'randomness.seed': 0,
        'default_hooks.logger.interval': 1,
        **more,
    }
    options = [f'{key}={value}' for key, value in options.items()]
    return ['--work-dir', str(work_dir), '--cfg-options', *options]


@pytest.fixture(scope='session')
def config_of(tmp_path_factory):
    """A function: the config of a very small model for a task."""
    folder = tmp_path_factory.mktemp('configs')
    return lambda task: write_config(task, folder)


TASKS = ['retinanet', pytest.param('mask_rcnn', marks=pytest.mark.slow), 'upernet']


@pytest.fixture(scope='session')
def trained(config_of, digits, tmp_path_factory, run_tool):
    """A function: the checkpoints of a task's short training, and merged, made once."""

    @cache
    def get(task):
        folder = tmp_path_factory.mktemp(task)
        run_tool('train', config_of(task), *arguments(task, folder), cwd=digits)
        checkpoint, merged = (folder / 'last_checkpoint').read_text(), folder / 'merged.pth'
        run_tool('reparameterize', config_of(task), checkpoint, merged, cwd=digits)
        return checkpoint, str(merged)

    return get


def predictions_of(task, config, checkpoint, folder, run_tool, digits, **options):
    """Of each image the scores or the label map."""
    folder.mkdir()
    out = folder / ('labels' if task == 'upernet' else 'out.pkl')
    run_tool(
        *('test', config, checkpoint, '--out', out),
        *arguments(task, folder / 'work', **options),
        cwd=digits,
    )
    if task == 'upernet':
        return [cv2.imread(str(path), cv2.IMREAD_UNCHANGED) for path in sorted(out.iterdir())]
    return scores_in(out)


def scores_in(path):
    with open(path, 'rb') as file:
        return [p['pred_instances']['scores'].numpy() for p in pickle.load(file)]


@pytest.fixture(scope='session')
def by_hook(config_of, trained, digits, tmp_path_factory, run_tool):
    """A function: what a task's trained model predicts, merged by the hook, and the folder."""

    @cache
    def get(task):
        folder = tmp_path_factory.mktemp('by_hook') / task
        files = config_of(task), trained(task)[0]
        return predictions_of(task, *files, folder, run_tool, digits), folder

    return get


@pytest.mark.parametrize('task', TASKS)
def test_both_forms_predict_the_same(task, config_of, trained, by_hook, digits, tmp_path, run_tool):
    checkpoint, merged = trained(task)
    assert os.path.getsize(merged) < os.path.getsize(checkpoint)
    found = [
        predictions_of(task, config_of(task), file, tmp_path / name, run_tool, digits, **options)
        for name, file, options in (
            ('training form', checkpoint, {'default_hooks.reparameterize.when': 'val'}),
            ('merged file', merged, {'model.backbone.deploy': True}),
        )
    ]
    for expected, *others in zip(*found, by_hook(task)[0]):
        assert expected.size
        for other in others:
            if task == 'upernet':
                assert (other != expected).mean() < 1e-3
            else:
                np.testing.assert_allclose(other, expected, atol=1e-5)


HOST = """
import runpy, sys
from yapf.yapflib import yapf_api

yapf_api.FormatCode = lambda text, **_: (text, True)  # takes seconds for a config
checkpoint, train, test = sys.argv[1], *(part.split('|') for part in sys.argv[2:])
for arguments in (train, test[:2] + [checkpoint] + test[2:]):
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name='__main__')
"""


def test_the_codebase_s_own_tools_do_the_same(config_of, trained, by_hook, digits, tmp_path):
    """In a process that imports repa_mm by the config alone."""
    own, config = trained('retinanet')[0], config_of('retinanet')
    host, out = tmp_path / 'host', tmp_path / 'host.pkl'
    commands = (
        ['train.py', config, *arguments('retinanet', host)],
        ['test.py', config, '--out', str(out), *arguments('retinanet', host / 'test')],
    )
    train, test = ('|'.join([codebase_tool([config], tool), *rest]) for tool, *rest in commands)
    done = subprocess.run(
        [sys.executable, '-c', HOST, host / 'epoch_1.pth', train, test],
        capture_output=True,
        text=True,
        cwd=digits,
        env=dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1'),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    weights = [torch.load(f, weights_only=False)['state_dict'] for f in (own, host / 'epoch_1.pth')]
    # Up to the order of sums, which may be another one in another process.
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-8)
    expected, folder = by_hook('retinanet')
    for a, b in zip(scores_in(out), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for work in (host / 'test', folder / 'work'):
        (log,) = (path.read_text() for path in work.glob('*/*.log'))
        assert 'Reparameterized 4 channel-idle FFNs' in log
