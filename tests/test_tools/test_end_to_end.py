"""Train, test in both forms, merge, test again, draw: as the tools do."""

import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import repa_mm
from repa_mm.run import (
    draw_predictions,
    init_model,
    load_config,
    reparameterize_checkpoint,
    runner_for_testing,
    runner_for_training,
)

from .conftest import TASKS

ROOT = Path(__file__).parents[2]
PACKAGE = dict(retinanet='mmdet', mask_rcnn='mmdet', upernet='mmseg')

# Two short epochs at a learning rate that lets BatchNorm statistics and
# weights move away from where they start.
SHORT = {'train_dataloader.batch_size': 4, 'default_hooks.logger.interval': 1}


def short(task):
    if task == 'upernet':
        return {
            **SHORT,
            'train_cfg.max_iters': 3,
            'train_cfg.val_interval': 3,
            'default_hooks.checkpoint.interval': 3,
        }
    return (
        {
            **SHORT,
            'train_cfg.max_epochs': 2,
            'train_cfg.val_interval': 2,
            'model.test_cfg.score_thr': 0.0,
        }
        if task == 'retinanet'
        else {
            **SHORT,
            'train_cfg.max_epochs': 2,
            'train_cfg.val_interval': 2,
            'model.test_cfg.rcnn.score_thr': 0.0,
        }
    )


def config_of(task):
    return repa_mm.config_path(f'demo/{task}_repa_swin_digits.py')


@pytest.fixture(scope='session', params=TASKS)
def trained(request, digits, tmp_path_factory):
    """A task and the checkpoint of a short training."""
    task = request.param
    pytest.importorskip(PACKAGE[task])
    work_dir = tmp_path_factory.mktemp(task)
    before = os.getcwd()
    os.chdir(digits)
    try:
        runner = runner_for_training(config_of(task), str(work_dir), cfg_options=short(task))
        runner.train()
    finally:
        os.chdir(before)
    checkpoint = (work_dir / 'last_checkpoint').read_text()
    assert os.path.isfile(checkpoint)
    return task, checkpoint


def predictions_of(task, checkpoint, work_dir, form):
    out = work_dir / f'{form}.pkl'
    runner = runner_for_testing(
        config_of(task), checkpoint, str(work_dir), form=form, out=str(out), cfg_options=short(task)
    )
    metrics = runner.test()
    assert os.listdir(work_dir).count(out.name) == 1
    assert not [f for f in os.listdir(work_dir) if 'partial' in f]
    with open(out, 'rb') as file:
        return metrics, pickle.load(file)


def assert_same_predictions(task, expected, actual):
    assert len(expected) == len(actual) == 4
    for a, b in zip(expected, actual):
        if task == 'upernet':
            assert 'seg_logits' not in a
            a, b = (p['pred_sem_seg']['data'] for p in (a, b))
            assert (a != b).float().mean() < 1e-3
            continue
        a, b = a['pred_instances'], b['pred_instances']
        assert len(a['scores']) == len(b['scores']) > 0
        # Nearly equal scores may change places; their values do not.
        assert torch.allclose(a['scores'], b['scores'], atol=1e-5)
        same = (a['bboxes'] - b['bboxes']).abs().amax(1) < 1e-2
        assert same.float().mean() > 0.8


def test_both_forms_predict_the_same(trained, in_digits):
    task, checkpoint = trained
    _, expected = predictions_of(task, checkpoint, in_digits, 'training')
    _, deployed = predictions_of(task, checkpoint, in_digits, 'deploy')
    assert_same_predictions(task, expected, deployed)

    merged = str(in_digits / 'merged.pth')
    result = reparameterize_checkpoint(config_of(task), checkpoint, merged)
    assert result['error'] < 1e-5
    for before, after in (result['parameters'], result['macs'], result['bytes']):
        assert after < before
    # With the config of the training form, through the hook.
    _, from_file = predictions_of(task, merged, in_digits, 'deploy')
    assert_same_predictions(task, expected, from_file)
    # And with the config of the deploy form.
    runner = runner_for_testing(
        config_of(task),
        merged,
        str(in_digits),
        cfg_options={**short(task), 'model.backbone.deploy': True},
    )
    assert runner.test()


def test_merged_checkpoint_keeps_its_meta(trained, in_digits):
    task, checkpoint = trained
    merged = str(in_digits / 'merged.pth')
    reparameterize_checkpoint(config_of(task), checkpoint, merged)
    before = torch.load(checkpoint, weights_only=False)
    after = torch.load(merged, weights_only=True)
    assert after['meta']['dataset_meta'] == before['meta']['dataset_meta']
    assert after['meta']['cfg'] == before['meta']['cfg']
    assert set(after) == {'meta', 'state_dict'}


@pytest.mark.parametrize('form', ['training', 'deploy'])
def test_draw_predictions(trained, in_digits, form):
    task, checkpoint = trained
    import mmcv

    folder = Path('data/demo/coco/val2017')
    image = str(next(folder.iterdir()))
    cfg = load_config(config_of(task), short(task))
    model = init_model(cfg, checkpoint, form)
    out = str(in_digits / 'new' / 'picture.png')
    draw_predictions(model, image, out, score_thr=0.0)
    picture, pixels = mmcv.imread(out), mmcv.imread(image)
    assert picture.shape[:2] == pixels.shape[:2]
    assert (picture != pixels).any()


def test_resume(trained, in_digits):
    task, checkpoint = trained
    options = short(task)
    for key in ('train_cfg.max_epochs', 'train_cfg.max_iters'):
        if key in options:
            options[key] += 1
    runner = runner_for_training(
        config_of(task), str(in_digits), resume=checkpoint, cfg_options=options
    )
    runner.train()
    loop = runner.train_loop
    assert (loop.iter, loop.epoch) in ((4, 0), (6, 3))


def run_tool(*args, **kwargs):
    return subprocess.run(
        [sys.executable, *map(str, args)],
        capture_output=True,
        text=True,
        env=dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1', PYTHON=sys.executable),
        **kwargs,
    )


def test_two_processes_through_the_scripts(digits, tmp_path):
    """dist_train.sh and dist_test.sh, with gloo where there is no GPU."""
    pytest.importorskip('mmdet')
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = str(s.getsockname()[1])
    config = config_of('retinanet')
    env = dict(os.environ, PORT=port, PYTHON=sys.executable, OMP_NUM_THREADS='1')
    options = [f'{k}={v}' for k, v in short('retinanet').items()]
    options += ['train_dataloader.batch_size=2']
    result = subprocess.run(
        [
            'bash',
            ROOT / 'tools/dist_train.sh',
            config,
            '2',
            '--work-dir',
            tmp_path / 'train',
            '--cfg-options',
            *options,
        ],
        capture_output=True,
        text=True,
        env=env,
        cwd=digits,
    )
    assert result.returncode == 0, result.stderr[-6000:]
    checkpoint = tmp_path / 'train/epoch_2.pth'
    result = subprocess.run(
        [
            'bash',
            ROOT / 'tools/dist_test.sh',
            config,
            checkpoint,
            '2',
            '--work-dir',
            tmp_path / 'test',
            '--cfg-options',
            *options,
        ],
        capture_output=True,
        text=True,
        env=env,
        cwd=digits,
    )
    assert result.returncode == 0, result.stderr[-6000:]
    assert 'Reparameterized 10 channel-idle FFNs' in result.stdout + result.stderr
    (metrics,) = (tmp_path / 'test').glob('*/*.json')
    distributed = json.loads(metrics.read_text())
    os.chdir(digits)
    single = runner_for_testing(
        config, str(checkpoint), str(tmp_path / 'single'), cfg_options=short('retinanet')
    ).test()
    assert distributed['coco/bbox_mAP'] == pytest.approx(single['coco/bbox_mAP'], abs=1e-3)


@pytest.mark.parametrize('tool', ['train', 'test', 'reparameterize', 'image_demo'])
def test_tools_say_what_is_wrong_in_one_line(tool, tmp_path):
    arguments = dict(
        train=['none.py'],
        test=['none.py', 'none.pth'],
        reparameterize=['none.py', 'none.pth', 'out.pth'],
        image_demo=['none.jpg', 'none.py', 'none.pth'],
    )[tool]
    result = run_tool(ROOT / f'tools/{tool}.py', *arguments, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1].startswith("error: no config at 'none.py'")
    assert 'Traceback' not in result.stderr
