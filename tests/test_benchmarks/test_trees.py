"""The crowns of trees in COCO's layout, on drawn photographs, and the ways to train on them."""

import json
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.registry import MODELS

from benchmarks import tables, trees
from repa_mm.convert import training_form

BOX = '<object><bndbox>' + ''.join(f'<{n}>{{}}</{n}>' for n in ('xmin', 'ymin', 'xmax', 'ymax'))
BOX += '</bndbox></object>'
TILES = dict(train=('a', 2, 3), val=('b', 3, 2), osbs=('c', 1, 1))


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Photographs with bright crowns of 6 to 11 pixels on a dark ground."""
    monkeypatch.setattr(trees, 'TILES', TILES)
    monkeypatch.setattr(trees, 'SIDES', dict(train=50, val=42, osbs=56))
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name, width, height in (('a', 100, 150), ('b', 90, 70), ('c', 56, 56)):
        image, boxes = np.zeros((height, width, 3), np.uint8), []
        for y in range(1, height - 12, 15):
            for x in range(2, width - 12, 14):
                w, h = rng.integers(6, 12, 2)
                boxes.append((x, y, x + w, y + h))
                image[y : y + h, x : x + w] = 200
        cv2.imwrite(f'{name}.png', image)
        Path(f'{name}.xml').write_text(f'<a>{"".join(BOX.format(*box) for box in boxes)}</a>')
    monkeypatch.setattr(sys, 'argv', ['trees', 'data', '.', '--out', 'data/trees'])
    trees.main()
    return tmp_path / 'data/trees'


def test_crowns(data):
    """Boxes are where crowns are, also after a turn; in tests each crown counts once."""
    for split, (name, *cells) in TILES.items():
        content = json.loads((data / f'annotations/instances_{split}2017.json').read_text())
        assert len(content['images']) == np.prod(cells) * (2 if split == 'train' else 1)
        images = {
            i['id']: cv2.imread(f'{data}/{split}2017/{i["file_name"]}') for i in content['images']
        }
        seen = {key: np.zeros(image.shape[:2], bool) for key, image in images.items()}
        for a in content['annotations']:
            x, y, w, h = map(int, a['bbox'])
            assert w and h and a['area'] == w * h
            assert (images[a['image_id']][y : y + h, x : x + w] == 200).all()
            seen[a['image_id']][y : y + h, x : x + w] = True
        assert all(np.array_equal(seen[key], images[key][..., 0] == 200) for key in images)
        counted = [a for a in content['annotations'] if not a['iscrowd']]
        if split == 'train':
            assert 0 < len(counted) < len(content['annotations'])
        else:
            assert len(counted) == len(trees.read_boxes(Path(f'{name}.xml')))


def test_ways(data, monkeypatch):
    """Each way has its weights and form, its test on both sites, and its rows."""
    found, tested = {}, []

    def train(cfg, folder):
        assert cfg.train_cfg.max_iters == 4 and cfg.randomness.seed == 3
        model = MODELS.build(cfg.model)
        model.init_weights()
        found[Path(folder).name], model.load_from = model, cfg.get('load_from')
        Path(folder).mkdir()
        path = Path(folder, 'weights.pth')
        torch.save(dict(state_dict=model.state_dict()), path)
        Path(folder, 'last_checkpoint').write_text(str(path))
        return str(path)

    def test(cfg, checkpoint, deploy, folder):
        assert deploy == ('stock' not in folder) and Path(cfg.test_evaluator.ann_file).exists()
        tested.append(cfg.test_dataloader.dataset.data_prefix['img'])
        return {'coco/bbox_mAP': 0.1, 'coco/bbox_mAP_50': 0.3}, trees.open_model(cfg, checkpoint)

    timed = trees.measure

    def measure(*args):
        assert not torch.is_grad_enabled()
        return timed(*args)

    arch = dict(embed_dims=24, num_layers=1, num_heads=2, feedforward_channels=96)
    load = trees.load_config

    def small(*args):
        cfg = load(*args)
        cfg.model.backbone.update(arch=arch, out_indices=[0])
        cfg.model.neck.in_channels = [24]
        return cfg

    for name, value in dict(train=train, test=test, measure=measure, load_config=small).items():
        monkeypatch.setattr(trees, name, value)
    monkeypatch.setattr(training_form, 'refine', lambda fit, *_: fit)
    vit = MODELS.build(dict(small(trees.config_path(trees.CONFIG)).model.backbone, init_cfg=None))
    Path('checkpoints').mkdir()
    torch.save(dict(state_dict=vit.state_dict()), trees.CHECKPOINT)
    ways = 'stock', 'fitted', 'copied'
    command = [
        'trees',
        'train',
        '--ways',
        *ways,
        '--seeds',
        '3',
        '--scale',
        'iterations=4',
        'fit=3',
    ]
    monkeypatch.setattr(sys, 'argv', command)
    trees.main()
    assert [*found] == [*ways]
    first = 'layers.0.ffn.fc1.weight'
    for name, key in (('stock', 'layers.0.ffn.layers.0.0.weight'), ('copied', first)):
        value = found[name].backbone.state_dict()[key]
        assert torch.equal(value, vit.state_dict()['layers.0.ffn.layers.0.0.weight'])
    fitted = torch.load('work_dirs/trees/fitted_3.pth')['state_dict'][first]
    assert torch.equal(found['fitted'].backbone.state_dict()[first], fitted)
    pretrained = vit.state_dict()['layers.0.ffn.layers.0.0.weight']  # in another order
    assert (fitted[:, None] == pretrained).all(-1).any(1).all()
    assert tested == 3 * ['val2017/', 'osbs2017/']
    rows = tables.read('work_dirs/trees.csv')
    assert {row['of'] for row in rows} == {
        'box AP', 'box AP50', 'box AP, another site', 'box AP50, another site',
        'latency of the backbone', 'latency of the backbone, times stock',
    }  # fmt: skip
    stock = Path('work_dirs/trees/trees_3/stock.pth')
    stock.write_bytes(Path('work_dirs/trees/trees_3/stock/weights.pth').read_bytes())
    command = ['trees', 'further', 'work_dirs/trees/trees_3/stock.py', '--seeds', '3']
    monkeypatch.setattr(sys, 'argv', [*command, '--scale', 'iterations=12'])
    trees.main()
    assert found['further_stock'].load_from == str(stock)
    forms = [row['form'] for row in tables.read('work_dirs/trees.csv')]
    assert forms[-12:] == 6 * ['stock'] + 6 * ['stock, trained further']
