"""Experts pass the tests of the package's own forms, structures and backbones."""

from pathlib import Path

import pytest
import torch
from mmengine.registry import MODELS
from mmpretrain.models import VisionTransformer

from projects.expert_averaging import ExpertsFFN, ExpertsVisionTransformer, MergedExperts
from repa_mm.reparam import CheckpointError, reparameterize
from tests import test_configs
from tests.shared import backbone_tests, export_test, form_tests
from tests.test_models import test_structures
from tests.test_models.test_backbones import VIT, check_same, scattered  # noqa: F401
from tests.test_models.test_structures import filled, vit_arch
from tests.test_reparam.test_forms import C, H, make  # noqa: F401
from tests.test_tools import structures as test_tools
from tests.test_tools.conftest import call, digits, in_digits  # noqa: F401

CONFIG = str(Path(__file__).parents[1] / 'configs' / 'experts_deit_t_in1k.py')
CFG = dict(type='ExpertsVisionTransformer', num_experts=3, **VIT)
VIT_ARGS = test_structures.VIT


FORM = (lambda: ExpertsFFN(C, H, 3, layer_scale_init_value=0.5)), MergedExperts, 1
# A merged ViT with layer scale is no ordinary one: its FFNs have the scale in their matrices.
BACKBONE = dict(CFG, layer_scale_init_value=0.5), 'mmpretrain.VisionTransformer', True

form_rows, test_as_other_forms, test_merge_is_exact = form_tests(dict(experts=FORM))
backbone_rows, test_as_other_backbones = backbone_tests(
    dict(experts=BACKBONE), 'ordinary_weights_are_refused_and_fill', own=('num_experts',)
)
test_the_export_agrees = export_test(lambda module: dict(ExpertsVisionTransformer=module.VIT))


def test_merges_into_an_ordinary_vit(scattered, check_same):  # noqa: F811
    model, ordinary = scattered(MODELS.build(CFG)), VisionTransformer(**VIT)
    ordinary.load_state_dict(reparameterize(model).state_dict(), strict=True)
    ordinary.eval()
    x = torch.randn(2, 3, 72, 88)
    with torch.no_grad():
        check_same(ordinary(x), model(x))


@pytest.mark.parametrize('first, second', [('Experts', 'ChannelIdle'), ('ChannelIdle', 'Experts')])
def test_a_site_takes_one_form(first, second, monkeypatch):
    monkeypatch.setitem(test_structures.FFN_FORMS, 'Experts', 'FFN of experts')
    test_structures.test_a_site_takes_one_form(first, second)


def test_weights_without_the_layer_scale_do_not_fill(tmp_path):
    """As those of merged experts, whose matrices have it."""
    kwargs = dict(num_experts=2, layer_scale_init_value=1e-5, **VIT_ARGS)
    merged = reparameterize(ExpertsVisionTransformer(vit_arch(1), **kwargs))
    with pytest.raises(CheckpointError, match='lacks .*gamma2'):
        filled(ExpertsVisionTransformer, vit_arch(1), merged, tmp_path / 'vit.pth', **kwargs)


def test_the_config_trains_a_step_and_merges(relative_error):
    test_configs.test_model_trains_a_step_and_merges(CONFIG, relative_error)
    hooks = test_configs.load(CONFIG).custom_hooks
    assert hooks == [dict(type='AverageExpertsHook', rate=1e-3)]


@pytest.mark.slow
def test_in_the_tools(in_digits, call):  # noqa: F811
    backbone = (
        "_delete_=True, type='ExpertsVisionTransformer', num_experts=2, "
        'arch=dict(embed_dims=16, num_layers=3, num_heads=2, feedforward_channels=32), '
        "img_size=96, patch_size=16, out_indices=[0, 1, 2], out_type='featmap'"
    )
    hook, project = "dict(type='AverageExpertsHook')", 'projects.expert_averaging'
    path = in_digits / 'experts.py'
    config = test_tools.write_config(path, backbone, [16] * 3, hook, project)
    test_tools.train_merge_and_test(config, in_digits, call)
