import pytest

import repa_mm
from repa_mm.benchmark.paper import COLUMNS, measure_pairs, paper_configs
from repa_mm.benchmark.variants import noise
from repa_mm.run import build_model, load_config


def config(name):
    pytest.importorskip('mmdet')
    return load_config(repa_mm.config_path(f'demo/retinanet_{name}_digits.py'))


def test_one_config_for_each_model_of_the_paper():
    assert len(paper_configs()) == 15


def test_each_idle_ratio_beside_the_vanilla_counterpart():
    rows = measure_pairs(config('repa_swin'), [0.25, 1], noise((64, 96), 2), repeats=2)
    vanilla = sum(p.numel() for p in build_model(config('swin')).parameters()) / 1e6
    found = []
    for row in rows:
        cells = dict(zip(COLUMNS, row, strict=True))
        assert cells['model'] == 'retinanet_repa_swin_digits'
        assert 'against stock' in cells and '%' in cells['of it by the merge']
        before, training, deploy = map(float, cells['parameters, M'].split(' / '))
        assert before == round(vanilla, 1) and deploy < before <= training
        before, training, deploy = map(float, cells['GMACs'].split(' / '))
        assert deploy < before == training
        found.append((cells['idle ratio'], deploy))
    assert [name for name, _ in found] == ['0.25', '1'] and found[0][1] > found[1][1]


def test_a_model_without_an_idle_ratio():
    cfg = config('swin')
    cfg.model.backbone.type = 'ProgressiveSwinTransformer'
    (row,) = measure_pairs(cfg, [], noise((64, 64), 1), repeats=1)
    assert row[1] == ''
