import pytest
import torch

import repa_mm
from repa_mm.benchmark.paper import COLUMNS, counterpart, measure_pairs, paper_configs
from repa_mm.benchmark.variants import noise, with_our_parts
from repa_mm.run import build_model, load_config


def test_poolformers_differ_in_the_memory_format_too():
    cfg = load_config(repa_mm.config_path('repa_poolformer_s12_in1k.py'))
    cfg.model.backbone.arch = dict(
        layers=[1, 1, 1, 1], embed_dims=[4, 8, 12, 16], mlp_ratios=[4] * 4,
        layer_scale_init_value=0.1,
    )  # fmt: skip
    cfg.model.head.in_channels = 16
    models, formats = with_our_parts(counterpart(cfg)), []
    x = noise((64, 64), 1)
    with torch.no_grad():
        torch.testing.assert_close(*(model(x) for model in models.values()))
    for model in models.values():
        model.backbone.network[2].register_forward_hook(
            lambda *args: formats.append(args[2].is_contiguous(memory_format=torch.channels_last))
        )
        model(x)
    assert formats == [False, True]


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
        assert 'against stock' in cells and '%' in cells['by the merge']
        before, training, deploy = map(float, cells['parameters, M'].split(' / '))
        assert before == round(vanilla, 2) and deploy < before <= training
        before, training, deploy = map(float, cells['GMACs'].split(' / '))
        assert deploy < before == training
        found.append((cells['idle ratio'], deploy))
    assert [name for name, _ in found] == ['0.25', '1'] and found[0][1] > found[1][1]


def test_a_model_without_an_idle_ratio():
    cfg = config('swin')
    cfg.model.backbone.type = 'ProgressiveSwinTransformer'
    (row,) = measure_pairs(cfg, [], noise((64, 64), 1), repeats=1)
    assert row[1] == ''
