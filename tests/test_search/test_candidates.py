"""Configs with faster parts build the same model, and can be narrowed."""

import copy

import cv2
import numpy as np
import pytest
import torch

from repa_mm.config import load_config
from repa_mm.convert.pretrained import convert_checkpoint
from repa_mm.export.export import noise, resized
from repa_mm.faster.attention import FastShiftWindowMSA
from repa_mm.faster.deformable import FastDeformableAttention
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


def write_images(folder):
    folder.mkdir()
    for i in range(3):
        image = np.random.default_rng(i).integers(0, 255, (128, 160, 3), np.uint8)
        cv2.imwrite(str(folder / f'{i}.png'), image)


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
    write_images(tmp_path / 'images')
    convert_checkpoint('faster.py', 'stock.pth', 'half.pth', 0.5, num_images=2, images='images')
    assert expected <= kinds(open_model(load_config('half.py'), 'half.pth'))
