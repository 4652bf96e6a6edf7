"""Affine mixers pass the tests of the package's own forms and backbones."""

from pathlib import Path

import pytest
import torch
import torch.nn as nn
from mmengine.registry import MODELS
from mmpretrain.models import RIFormer

from projects.riformer import AffineRIFormer, MergedNorm, MixerParts, NormedAffine
from repa_mm.reparam import reparameterize
from tests import test_configs
from tests.shared import backbone_tests, export_test, form_tests
from tests.test_models.test_backbones import POOL, check_same, images, pretrained, scattered  # noqa: F401
from tests.test_reparam import test_forms
from tests.test_reparam.test_forms import C, make  # noqa: F401
from tests.test_tools import structures as test_tools
from tests.test_tools.conftest import call, digits, in_digits  # noqa: F401

CONFIG = str(Path(__file__).parents[1] / 'configs' / 'riformer_s12_in1k.py')
CFG = dict(type='AffineRIFormer', **POOL)


def maps(name, batch=4, **kwargs):
    return torch.randn(batch, C, 3, 4, **kwargs)


form_rows, test_as_other_forms, test_merge_is_exact = form_tests(
    dict(mixer=(lambda: NormedAffine(C), MergedNorm, 1))
)
backbone_rows, test_as_other_backbones = backbone_tests(
    dict(riformer=(CFG, 'mmpretrain.RIFormer', True)), 'ordinary_weights_are_refused_and_fill'
)
test_the_export_agrees = export_test(lambda module: dict(AffineRIFormer=dict(arch=module.POOL)))


@pytest.fixture(autouse=True)
def _maps(monkeypatch):
    monkeypatch.setattr(test_forms, 'tokens', maps)


def test_filled_it_computes_what_norm_and_affine_map_do(relative_error):
    parts = MixerParts(nn.GroupNorm(1, C), nn.Conv2d(C, C, 1, groups=C))
    for p in parts.norm.parameters():
        nn.init.uniform_(p, 0.5, 1.5)
    form = NormedAffine(C)
    form.fill(parts)
    x = maps('mixer')
    u = parts.norm(x)
    assert relative_error(form(x), parts.affine(u) - u) < 1e-6


def test_merges_into_a_riformer(scattered, check_same):  # noqa: F811
    model, ordinary = scattered(MODELS.build(CFG)), RIFormer(deploy=True, **POOL)
    ordinary.load_state_dict(reparameterize(model).state_dict(), strict=True)
    ordinary.eval()
    x = images('riformer')
    with torch.no_grad():
        check_same(ordinary(x), model(x))


def test_a_poolformer_fills_all_except_the_affine_maps(scattered, tmp_path):  # noqa: F811
    pool = scattered(MODELS.build(dict(type='mmpretrain.PoolFormer', **POOL)))
    model = AffineRIFormer(init_cfg=pretrained(pool, tmp_path / 'pool.pth'), **POOL)
    model.init_weights()
    form, block = model.network[0][0].norm_reparam, pool.network[0][0]
    assert torch.equal(form.norm.weight, block.norm1.weight)
    assert torch.equal(model.network[0][0].mlp.fc1.weight, block.mlp.fc1.weight)


def test_the_config_trains_a_step_and_merges(relative_error):
    test_configs.test_model_trains_a_step_and_merges(CONFIG, relative_error)
    (hook,) = test_configs.load(CONFIG).custom_hooks
    assert hook.type == 'ImitateMixersHook' and hook.teacher.type == 'mmpretrain.PoolFormer'


@pytest.mark.slow
def test_in_the_tools(in_digits, call):  # noqa: F811
    backbone = (
        "_delete_=True, type='AffineRIFormer', out_indices=[2, 4, 6], "
        'arch=dict(layers=[1, 1, 1, 1], embed_dims=[8, 16, 24, 32])'
    )
    path = in_digits / 'mixers.py'
    config = test_tools.write_config(path, backbone, [16, 24, 32], '', 'projects.riformer')
    test_tools.train_merge_and_test(config, in_digits, call)
