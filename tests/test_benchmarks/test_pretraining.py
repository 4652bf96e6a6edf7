"""The ways to start from pretrained weights, on a handful of scenes."""

import sys
from pathlib import Path

import torch
from mmengine.registry import DATASETS, MODELS

from benchmarks import pretraining, tables
from repa_mm.convert import training_form

# Name of the first layer of an ordinary FFN, and of a channel-idle one.
ORDINARY, IDLE = 'ffn.layers.0.0.weight', 'ffn.fc1.weight'


def test_pretraining(tmp_path, monkeypatch, capsys):
    """Each way trains from its weights, on other scenes than the classifier's, and has a row."""
    monkeypatch.chdir(tmp_path)
    found = {}

    def train(cfg, folder):
        model = MODELS.build(cfg.model)
        model.init_weights()
        scenes = DATASETS.build(cfg.train_dataloader.dataset)
        names = {
            Path(scene['data_samples'].img_path).stem
            for scene in map(scenes.__getitem__, range(16))
        }
        assert names == {f'{i:012d}' for i in range(1, 17)} and len(scenes) == 16
        found[Path(folder).name] = model.backbone
        Path(folder).mkdir()
        return 'weights.pth'

    def test(cfg, checkpoint, deploy, folder):
        assert deploy == ('stock' not in Path(folder).name)
        return {'coco/bbox_mAP': 0.1 * len(found)}, None

    def read_crops(root, split, skip=0, repeats=1):
        assert skip == (16 if split == 'train' else 0)
        return crops(root, split, skip, repeats)

    crops = pretraining.read_crops
    monkeypatch.setattr(pretraining, 'read_crops', read_crops)
    monkeypatch.setattr(pretraining, 'train', train)
    monkeypatch.setattr(pretraining, 'test', test)
    monkeypatch.setattr(training_form, 'refine', lambda fit, *_: fit)
    command = ['pretraining', '--small', '--device', 'cpu', '--tasks', 'digits', '--seeds', '3']
    monkeypatch.setattr(sys, 'argv', command)
    pretraining.main()

    rows = tables.read('work_dirs/pretraining.csv')
    values = {row['form']: (row['run'], row['value']) for row in rows}
    assert len(rows) == len(pretraining.WAYS)
    for i, (way, (form, weights, _)) in enumerate(pretraining.WAYS.items(), 1):
        assert values[form] == ('seed 3', str(10 * i))
        given = torch.load(f'work_dirs/pretraining/digits_3/{weights}.pth')['state_dict']
        block, name = found[way].stages[0].blocks[0], 'stages.0.blocks.0.'
        own, theirs = (ORDINARY if w == 'stock' else IDLE for w in (way, weights))
        torch.testing.assert_close(block.get_parameter(own), given[name + theirs])
        qkv = 'attn.w_msa.qkv.weight'
        torch.testing.assert_close(block.get_parameter(qkv), given[name + qkv])
        if way != 'stock':
            kind = torch.nn.LayerNorm if way == 'fitted' else torch.nn.BatchNorm1d
            assert isinstance(block.ffn.norm1, kind) and block.ffn.num_active == 48
    assert '| channel idle, fitted | 20.0 | 20 |' in capsys.readouterr().out
