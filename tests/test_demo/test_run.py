"""The whole demonstration on a handful of scenes."""

import os.path as osp

import cv2
import pytest
import torch

from demo import run
from demo.dataset import write_digit_scenes
from repa_mm import config_path
from repa_mm.apis import open_model
from repa_mm.io.configs import load_config
from repa_mm.search import Row
from tests.conftest import random_model

# One block for each stage.
SMALL = {'model.backbone.arch.depths': [1, 1, 1, 1]}
RETINANET = {
    **SMALL,
    'model.backbone.arch.embed_dims': 24,
    'model.neck.in_channels': [48, 96, 192],
    'train_dataloader.batch_size': 4,
    'train_cfg.max_epochs': 1,
    'train_cfg.val_interval': 2,
}


@pytest.fixture
def scenes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_digit_scenes('data/demo', num_train=8, num_val=4)
    return tmp_path


@pytest.mark.parametrize(
    'task', ['retinanet', 'mask_rcnn', pytest.param('upernet', marks=pytest.mark.slow)]
)
def test_demo(task, scenes, capsys):
    """A trained model, or one of random weights, is tested in its forms, measured and drawn."""
    checkpoint = None
    options = RETINANET if task == 'retinanet' else SMALL
    if task != 'retinanet':
        config = config_path(f'demo/{task}_repa_swin_digits.py')
        model = random_model(load_config(config, options))
        checkpoint = 'random.pth'
        torch.save(dict(state_dict=model.state_dict(), meta={}), checkpoint)
    rows = run.run_demo(task, 'out', checkpoint, options)
    out = capsys.readouterr().out
    assert 'latency, backbone (ms)' in out and 'Total time: ' in out
    before, *after = rows.values()
    if task == 'mask_rcnn':  # RetinaNet finds nothing here
        assert after[0]['mask AP'] == before['mask AP'] >= 0
    (row,) = after
    assert row.keys() == before.keys()
    for key in ('parameters, model (M)', 'GMACs, backbone, 160x160'):
        assert before[key] > row[key]
    assert float(out.split('largest feature: ')[1].split()[0]) < 1e-4
    pictures = [cv2.imread(str(path)) for path in (scenes / 'out' / 'pictures').iterdir()]
    assert [picture.shape[:2] for picture in pictures] == [(160, 320)] * 4  # both side by side
    assert (scenes / 'out' / 'summary.json').is_file()


def test_speed_up(scenes, monkeypatch, capsys):
    """A stock model is trained, and given to the one command with its data."""
    calls = []

    def speed_up(*args, **kwargs):
        calls.append((args, kwargs))
        return [Row('stock', ms=1.0)]

    monkeypatch.setattr(run, 'speed_up', speed_up)
    rows = run.run_demo('speed_up', 'out', None, RETINANET)
    (((config, checkpoint, folder, max_loss), options),) = calls
    assert rows == {'stock, PyTorch': Row('stock', ms=1.0)}
    assert config == config_path('demo/retinanet_swin_digits.py') and max_loss > 0
    assert open_model(load_config(config, RETINANET), checkpoint)  # the trained one fits
    assert folder == osp.join('out', 'speed_up') and options['cfg_options'] == RETINANET
    assert options['num_images'] > 100 and 'Total time: ' in capsys.readouterr().out


def test_command_line(monkeypatch):
    calls = []
    monkeypatch.setattr(run, 'run_demo', lambda *args: calls.append(args))
    monkeypatch.setattr(run, 'write_digit_scenes', calls.append)
    command = ['demo.py', '--task', 'speed_up', '--checkpoint', 'v.pth', '--cfg-options', 'a.b=3']
    for argv in (command, ['demo.py', '--work-dir', 'x'], ['demo.py', '--task', 'data']):
        monkeypatch.setattr('sys.argv', argv)
        run.main()
    folder = osp.join('work_dirs', 'demo', 'speed_up')
    assert calls == [
        ('speed_up', folder, 'v.pth', {'a.b': 3}),
        ('retinanet', 'x', None, None),
        'data/demo',
    ]
