"""Configs with faster parts build the same model, and can be narrowed."""

import copy

import pytest
import torch
from mmengine.registry import MODELS

from repa_mm.config import load_config
from repa_mm.convert.pretrained import converted_config
from repa_mm.export import noise, resized
from repa_mm.faster.attention import FastShiftWindowMSA
from repa_mm.faster.deformable import FastDeformableAttention
from repa_mm.models.sites import ffn_sites
from repa_mm.opening import open_model
from repa_mm.search.candidates import with_faster_parts
from tests.conftest import random_model
from tests.test_export.conftest import write_config

pytest.importorskip('mmdet')
pytest.importorskip('mmseg')

CASES = dict(
    retinanet=(FastShiftWindowMSA,), upernet=('FastUPerHead', FastShiftWindowMSA),
    dino=(FastDeformableAttention,),
)  # fmt: skip


def kinds(model):
    return {type(module) for module in model.modules()}


@pytest.mark.parametrize('task', CASES)
def test_the_config_is_of_the_same_model(task, tmp_path, monkeypatch, randomize):
    from repa_mm.faster.uper_head import FastUPerHead

    if task == 'dino':
        from tests.test_export.test_transformers import detector

        stock, cfg = detector(task, randomize)
    else:
        cfg = load_config(write_config(task, tmp_path, repa=False))
        stock = randomize(random_model(cfg))
    monkeypatch.chdir(tmp_path)
    torch.save(dict(state_dict=stock.state_dict()), 'stock.pth')
    before = copy.deepcopy(cfg.model)
    with_faster_parts(cfg, stock).dump('faster.py')
    assert cfg.model == before
    data = resized(noise(cfg), [(128, 160)])
    faster = open_model(load_config('faster.py'), 'stock.pth')
    expected = {FastUPerHead if kind == 'FastUPerHead' else kind for kind in CASES[task]}
    assert expected <= kinds(faster) and not expected & kinds(stock)
    found, wanted = (model.test_step(copy.deepcopy(data))[0] for model in (faster, stock))
    if task == 'upernet':
        same = found.pred_sem_seg.data == wanted.pred_sem_seg.data
        assert same.float().mean() > 0.999 and len(wanted.pred_sem_seg.data.unique()) > 1
    else:
        found, wanted = (x.pred_instances.scores for x in (found, wanted))
        assert len(wanted) > 5 and torch.allclose(found, wanted, atol=1e-5)
    # Narrower models keep the parts, and nothing changes where there are none.
    cfg = load_config('faster.py')
    assert with_faster_parts(cfg, faster) is cfg
    sizes = {s.block_name: (8,) for s in ffn_sites(faster)}
    narrow = MODELS.build(converted_config(cfg, faster, sizes).model)
    assert expected <= kinds(narrow)
    assert {s.parts().fc1.out_features for s in ffn_sites(narrow)} == {8}
