"""Small models after a conversion and before more training, on a handful of scenes."""

import copy
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import narrower, tables
from demo.dataset import write_digit_scenes
from repa_mm.apis import open_model
from repa_mm.convert import parts, training_form

SMALL = (
    'model.backbone.arch.depths=[1,1,1,1]',
    'model.backbone.arch.embed_dims=24',
    'model.neck.in_channels=[48,96,192]',
    'train_dataloader.batch_size=4',
)


def test_narrower(tmp_path, monkeypatch):
    """One row for each form; the original is trained once, and its weights start the others."""
    monkeypatch.chdir(tmp_path)
    write_digit_scenes('data/demo', num_train=8, num_val=4)
    digits = narrower.TASKS['digits']._replace(epoch=2, epochs=1)
    monkeypatch.setitem(narrower.TASKS, 'digits', digits)
    monkeypatch.setattr(narrower, 'HEADS', dict([*narrower.HEADS.items()][-1:]))
    trained = []

    def train(cfg, folder):
        """Nothing: the weights are those that the training would start from."""
        trained.append(copy.deepcopy(cfg))  # a training of another length changes it
        path = Path(folder) / 'weights.pth'
        path.parent.mkdir(parents=True)
        torch.save(dict(state_dict=open_model(cfg, cfg.load_from).state_dict()), path)
        path.with_name('last_checkpoint').write_text(str(path))
        return str(path)

    def test(cfg, checkpoint, deploy, folder):
        return {'coco/bbox_mAP': 0.5}, open_model(cfg, checkpoint, merge=deploy)

    for module in (parts, training_form):  # the widths are what they are without it
        monkeypatch.setattr(module, 'refine', lambda fit, *_: fit)
    monkeypatch.setattr(narrower, 'train', train)
    monkeypatch.setattr(narrower, 'test', test)
    command = ['narrower', '--task', 'digits', '--seeds', '3', '--out', 'found.csv']
    command += ['--lr-factors', '3', '--epochs', '0', '1']
    monkeypatch.setattr(sys, 'argv', [*command, '--cfg-options', *SMALL])
    narrower.main()

    rows = tables.read('found.csv')
    found = {(row['what'], row['form']) for row in rows}
    expected = {('channels and heads: box AP', form) for form in ('original', *narrower.HEADS)}
    for way, form in narrower.WAYS.items():
        names = ['no epoch', 'one epoch, 3 times the rate'][way == 'idle' :]
        expected |= {(f'fine-tuned: {name}', form) for name in names}
    assert found == expected and len(rows) == len(expected)
    assert {row['run'] for row in rows} == {'seed 3'}

    original = narrower.Run('digits', 3, narrower.argparse.Namespace(work_dir='work_dirs/narrower'))
    assert [cfg.optim_wrapper.optimizer.lr for cfg in trained[1:]] == pytest.approx(4 * [3e-4])
    starts = [cfg.load_from or cfg.model.get('init_cfg', {}).get('checkpoint') for cfg in trained]
    assert starts[0] is None and starts[1] == starts[3] == original.original
    assert starts[2].endswith('converted.pth') and starts[4].endswith('fitted.pth')
