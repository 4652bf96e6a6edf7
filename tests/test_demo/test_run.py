"""The whole demonstration on a handful of scenes."""

import os.path as osp

import cv2
import pytest
import torch

pytest.importorskip('mmdet')
pytest.importorskip('sklearn')
pytest.importorskip('skimage')

from repa_mm import config_path  # noqa: E402
from repa_mm.config import build_model, load_config  # noqa: E402
from repa_mm.demo import run  # noqa: E402
from repa_mm.demo.dataset import write_digit_scenes  # noqa: E402

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


@pytest.mark.parametrize('task', ['retinanet', 'mask_rcnn', 'upernet', 'convert'])
def test_demo(task, scenes, capsys):
    """A trained model, or one of random weights, is tested in its forms, measured and drawn."""
    checkpoint = None
    options = RETINANET if task in ('retinanet', 'convert') else SMALL
    if task == 'upernet':
        pytest.importorskip('mmseg')
    if task != 'retinanet':
        name = 'retinanet_swin' if task == 'convert' else f'{task}_repa_swin'
        model = build_model(load_config(config_path(f'demo/{name}_digits.py'), options))
        checkpoint = 'random.pth'
        torch.save(dict(state_dict=model.state_dict(), meta={}), checkpoint)
    rows = run.run_demo(task, 'out', checkpoint, options)
    out = capsys.readouterr().out
    assert 'latency, backbone (ms)' in out and 'Total time: ' in out
    before, *after = rows.values()
    if task == 'mask_rcnn':  # RetinaNet finds nothing here
        assert after[0]['mask AP'] == before['mask AP'] >= 0
    assert len(after) == (2 if task == 'convert' else 1)
    for row in after:
        assert row.keys() == before.keys()
        for key in ('parameters, model (M)', 'GMACs, backbone, 160x160'):
            assert before[key] > row[key]
    if task != 'convert':
        assert float(out.split('largest feature: ')[1].split()[0]) < 1e-4
    pictures = [cv2.imread(str(path)) for path in (scenes / 'out' / 'pictures').iterdir()]
    assert [picture.shape[:2] for picture in pictures] == [(160, 320)] * 4  # both side by side
    assert (scenes / 'out' / 'summary.json').is_file()


def test_command_line(monkeypatch):
    calls = []
    monkeypatch.setattr(run, 'run_demo', lambda *args: calls.append(args))
    monkeypatch.setattr(run, 'write_digit_scenes', calls.append)
    command = ['demo.py', '--task', 'convert', '--vanilla', 'v.pth', '--cfg-options', 'a.b=3']
    for argv in (command, ['demo.py', '--work-dir', 'x'], ['demo.py', '--task', 'data']):
        monkeypatch.setattr('sys.argv', argv)
        run.main()
    folder = osp.join('work_dirs', 'demo', 'convert')
    assert calls == [
        ('convert', folder, 'v.pth', {'a.b': 3}),
        ('retinanet', 'x', None, None),
        'data/demo',
    ]
