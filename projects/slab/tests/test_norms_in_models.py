"""Progressive norms pass the tests of the package's own forms and backbones."""

from pathlib import Path

import pytest
import torch
import torch.nn as nn
from mmpretrain.models import VisionTransformer

from projects.slab import (
    AffineMap,
    MergedLinear,
    NormedLinear,
    NormedShiftWindowMSA,
    ProgressiveNorm,
    ProgressiveVisionTransformer,
)
from projects.slab.norms import NormParts
from repa_mm.models import add_structures_
from repa_mm.reparam import reparameterize
from tests import test_configs
from tests.shared import backbone_tests, form_tests
from tests.test_models.test_backbones import SWIN, VIT, build, check_same, scattered  # noqa: F401
from tests.test_models.test_structures import vit_arch
from tests.test_reparam.test_forms import C, make  # noqa: F401
from tests.test_tools import structures as structures_in_tools
from tests.test_tools.conftest import call, digits, in_digits  # noqa: F401

FORMS = dict(
    norm=(lambda: ProgressiveNorm(C), AffineMap),
    linear=(lambda: NormedLinear(ProgressiveNorm(C), nn.Linear(C, 24)), MergedLinear),
    linear_without_bias=(
        lambda: NormedLinear(ProgressiveNorm(C), nn.Linear(C, 24, bias=False)),
        MergedLinear,
    ),
)
BOTH = [dict(type='ChannelIdle'), dict(type='ProgressiveNorms')]
BACKBONES = dict(
    vit=(dict(type='ProgressiveVisionTransformer', **VIT), 'mmpretrain.VisionTransformer', True),
    swin=(dict(type='ProgressiveSwinTransformer', **SWIN), 'mmpretrain.SwinTransformer', True),
    idle=(
        dict(
            type='Restructured',
            model=dict(type='mmpretrain.SwinTransformer', **SWIN),
            structures=BOTH,
        ),
        'mmpretrain.SwinTransformer',
        False,
    ),
)


form_rows, test_as_other_forms, test_a_form_merges_exactly = form_tests(
    FORMS, 'merging_before_the_schedule_has_ended_is_refused', small=1e-3, hostile=range(4, 8)
)
backbone_rows, test_as_other_backbones = backbone_tests(
    BACKBONES, 'ordinary_weights_are_refused_and_fill'
)


def config(name):
    return str(Path(__file__).parents[1] / 'configs' / f'progressive_{name}_in1k.py')


@pytest.mark.parametrize('name', FORMS)
def test_filled_with_ordinary_weights_it_computes_what_they_do(name, relative_error):
    form, norm = FORMS[name][0]().eval(), nn.LayerNorm(C)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.uniform_(norm.bias, -0.5, 0.5)
    linear = None if name == 'norm' else nn.Linear(C, 24, bias=name == 'linear')
    before = [p.data_ptr() for p in form.parameters()]
    form.fill(NormParts(norm, linear))
    assert [p.data_ptr() for p in form.parameters()] == before
    assert all(p.grad_fn is None and p.requires_grad for p in form.parameters())
    x = torch.randn(4, 12, C)
    assert relative_error(form(x), norm(x) if linear is None else linear(norm(x))) < 1e-5


@pytest.mark.parametrize('fast_attention', [True, False])
def test_padding_is_not_normalized(fast_attention, scattered, check_same):  # noqa: F811
    """With gradients, without, and in a traced graph, all of which pad the normalized map."""
    model = scattered(build('swin', fast_attention=fast_attention))
    block = model.stages[0].blocks[0]
    assert type(block.attn) is NormedShiftWindowMSA
    x, shape = torch.randn(2, 13 * 13, 8), (13, 13)
    normed = block.attn.w_msa.qkv.norm(x).view(2, 13, 13, 8)
    whole = torch.nn.functional.pad(normed, (0, 0, 0, 3, 0, 3)).flatten(1, 2)
    # By the stock attention, of a map of whole windows.
    stock = build('swin').build_ordinary().stages[0].blocks[0].attn.eval()
    weights = {k.replace('.linear.', '.'): v for k, v in block.attn.state_dict().items()}
    stock.load_state_dict(weights, strict=False)
    expected = stock(whole, (16, 16)).view(2, 16, 16, 8)[:, :13, :13].flatten(1, 2)
    merged = reparameterize(model).stages[0].blocks[0].attn
    for attention in (block.attn, merged):
        assert attention(x, shape).requires_grad
        check_same([attention(x, shape)], [expected])
        attention.requires_grad_(False)
        with torch.no_grad():
            check_same([attention(x, shape)], [expected])
            traced = torch.jit.trace(lambda x, of=attention: of(x, shape), x, check_trace=False)
            check_same([traced(x)], [expected])


def test_a_traced_model_pads_as_another_one(scattered, check_same):  # noqa: F811
    model = scattered(build('swin'))
    x = torch.randn(2, 3, 50, 50)
    with torch.no_grad():
        traced = torch.jit.trace(reparameterize(model), x, check_trace=False)
        check_same(traced(x), model(x))


def test_a_frozen_norm_freezes_no_linear_layer():
    norm_cfg = dict(type='LN', requires_grad=False)
    model = ProgressiveVisionTransformer(vit_arch(1), img_size=32, norm_cfg=norm_cfg)
    assert model.layers[0].attn.qkv.linear.weight.requires_grad


def test_an_attention_with_a_form_inside_of_it_keeps_its_norm_outside():
    """The norm becomes an affine map: what reads it is no linear layer that is known."""
    model = VisionTransformer(vit_arch(1), img_size=32)
    model.layers[0].attn = nn.Identity()
    add_structures_(model, [dict(type='ProgressiveNorms')])
    assert type(model.layers[0].ln1) is ProgressiveNorm
    assert type(model.layers[0].ffn.layers[0][0]) is NormedLinear


CONFIGS = ['deit_t', 'deit_b', 'swin_t', 'swin_s', 'swin_b']


# Without Swin-B: activations grow with depth after one step, and with them the rounding in float64.
@pytest.mark.parametrize(
    'name', [CONFIGS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS[1:-1])]
)
def test_the_config_trains_a_step_and_merges(name, relative_error):
    test_configs.test_model_trains_a_step_and_merges(config(name), relative_error)


@pytest.mark.parametrize('name', CONFIGS)
def test_the_schedule_is_that_of_the_paper(name):
    cfg = test_configs.load(config(name))
    assert cfg.custom_hooks == [dict(type='ScheduleHook', warmup=0.8)]
    assert cfg.default_hooks.reparameterize == dict(type='ReparameterizeHook')
    assert cfg.train_cfg.max_epochs == 300 and cfg.auto_scale_lr.base_batch_size == 1024


def test_in_the_tools(in_digits, call):  # noqa: F811
    backbone = (
        "_delete_=True, type='Restructured', model={{_base_.model.backbone}}, "
        f'structures={BOTH}'
    )
    hook, project = "dict(type='ScheduleHook', warmup=1)", 'projects.slab'
    path = in_digits / 'progressive.py'
    config = structures_in_tools.write_config(path, backbone, [96, 192, 384], hook, project)
    structures_in_tools.check_merging_before_the_end_is_refused(config, in_digits, call)
    structures_in_tools.train_merge_and_test(config, in_digits, call)
