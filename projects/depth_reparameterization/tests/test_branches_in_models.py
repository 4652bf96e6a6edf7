"""Branches pass the tests of the package's own forms and backbones, and take ordinary layers."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS
from mmpretrain.models import SwinTransformer, VisionTransformer

from projects.depth_reparameterization import (
    OrdinaryAttention,
    OrdinaryFFN,
    ParallelAttention,
    ParallelFFN,
    ParallelSwinTransformer,
    ParallelVisionTransformer,
)
from repa_mm.faster import FastShiftWindowMSA
from repa_mm.models import add_structures_
from repa_mm.reparam import AttentionParts, CheckpointError, FFNParts, TrainingForm
from tests import test_configs
from tests.shared import backbone_tests, export_test, form_tests, run_test
from tests.test_configs import load
from tests.test_models import test_backbones, test_structures
from tests.test_models.test_backbones import check_same, scattered  # noqa: F401
from tests.test_models.test_structures import VIT, RestructuredViT, filled, vit_arch
from tests.test_reparam.test_forms import C, H, make  # noqa: F401
from tests.test_tools import structures as structures_in_tools
from tests.test_tools.conftest import call, digits, in_digits  # noqa: F401

FORMS = dict(
    branches=(lambda: ParallelFFN(C, H, 3, layer_scale_init_value=0.5), OrdinaryFFN, 3),
    attention=(
        lambda: ParallelAttention(C, 4, 2, layer_scale_init_value=0.5),
        OrdinaryAttention,
        2,
    ),
    windows=(
        lambda: ParallelAttention(C, 4, 2, window_size=(3, 4), qk_scale=0.3),
        OrdinaryAttention,
        2,
    ),
)
SWIN = dict(test_backbones.SWIN, arch=dict(test_backbones.SWIN['arch'], depths=[2, 2, 4, 2]))
BACKBONES = dict(
    vit=(
        dict(type='ParallelVisionTransformer', num_branches=3, **test_backbones.VIT),
        'mmpretrain.VisionTransformer',
        False,
    ),
    swin=(
        dict(type='ParallelSwinTransformer', num_branches=[1, 1, 2, 1], **SWIN),
        'mmpretrain.SwinTransformer',
        False,
    ),
)
WINDOWS = dict(window_size=4, img_size=64, pad_small_map=True, out_indices=(0, 1, 2, 3))
every_form = pytest.mark.parametrize('name', FORMS)
every_backbone = pytest.mark.parametrize('name', BACKBONES)


form_rows, test_as_other_forms, test_a_form_merges_exactly = form_tests(
    FORMS, 'merging_before_the_schedule_has_ended_is_refused', small=1e-3
)
backbone_rows, test_as_other_backbones = backbone_tests(BACKBONES, own=('num_branches',))
test_export = export_test(
    lambda module: dict(
        ParallelVisionTransformer=dict(module.VIT, num_branches=2),
        ParallelSwinTransformer=dict(module.SWIN, num_branches=(1, 1, 2, 1), pad_small_map=True),
    )
)


def config(name):
    return str(Path(__file__).parents[1] / 'configs' / f'{name}.py')


def swin_arch(depths):
    return dict(embed_dims=8, depths=depths, num_heads=[1, 2, 2, 4])


def ordinary(name):
    """Ordinary parts with random weights, and what they compute of normalized tokens."""
    norm, scale = nn.LayerNorm(C), torch.rand(C) + 0.5
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.uniform_(norm.bias, -0.5, 0.5)
    if name == 'branches':
        parts = FFNParts(norm, nn.Linear(C, H), nn.GELU(), nn.Linear(H, C), scale)
        return parts, lambda x: parts.fc2(F.gelu(parts.fc1(norm(x)))) * scale
    table = torch.randn(35, 4) if name == 'windows' else None
    parts = AttentionParts(norm, nn.Linear(C, 3 * C), nn.Linear(C, C), scale, table)

    def attend(x):
        q, k, v = parts.qkv(norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        bias = 0
        if table is not None:
            bias = table[FORMS[name][0]().relative_position_index].permute(2, 0, 1)
        p = (q @ k.transpose(2, 3) * (0.3 if name == 'windows' else 0.5) + bias).softmax(-1)
        return parts.proj((p @ v).transpose(1, 2).flatten(2)) * scale

    return parts, attend


@every_form
def test_filled_with_ordinary_weights_it_computes_what_they_do(name, relative_error):
    form = FORMS[name][0]().eval()
    sources = [ordinary(name) for _ in range(FORMS[name][2])]
    before = [p.data_ptr() for p in form.parameters()]
    form.fill(*(parts for parts, _ in sources))
    assert [p.data_ptr() for p in form.parameters()] == before
    assert all(p.grad_fn is None and p.requires_grad for p in form.parameters())
    x = torch.randn(4, 12, C)
    u = F.layer_norm(x, (C,))
    actual = form(u, x) - x if name == 'branches' else form(u)
    assert relative_error(actual, sum(function(x) for _, function in sources)) < 1e-5


@every_backbone
def test_merges_into_the_ordinary_backbone(name, request):
    check = test_backbones.check_merges_into_the_ordinary_backbone
    run_test(check, request, name=name, kind=BACKBONES[name][1])


def test_masked_autoencoder_begins_a_classifier():
    args = dict(test_backbones.VIT, num_branches=2)
    args.pop('out_type')
    model = MODELS.build(dict(type='ParallelMAEViT', **args))
    model.init_weights()
    latent, mask, _ = model.train()(torch.randn(2, 3, 32, 32))
    assert latent.shape == (2, 5, 32) and mask.mean() == 0.75
    classifier = test_backbones.build('vit', num_branches=2)
    classifier.load_state_dict(model.state_dict(), strict=True)


@pytest.mark.parametrize('scale', [0.0, 1e-5])
def test_ordinary_layers_fill_the_branches(scale, randomize, relative_error, tmp_path):
    """Each branch computes from the block's input what its layer computes from it."""
    kwargs = dict(VIT, layer_scale_init_value=scale)
    ordinary = randomize(VisionTransformer(vit_arch(6), **kwargs))
    ordinary.eval()
    for layer in ordinary.layers if scale else ():
        torch.nn.init.uniform_(layer.attn.gamma1.weight, -1, 1)
        torch.nn.init.uniform_(layer.ffn.gamma2.weight, -1, 1)
    model = filled(
        ParallelVisionTransformer, vit_arch(2), ordinary, tmp_path / 'vit.pth', num_branches=3,
        **kwargs,
    )  # fmt: skip
    x = torch.randn(2, 17, 16)
    for i, block in enumerate(model.layers):
        layers = ordinary.layers[3 * i : 3 * i + 3]
        middle = x + sum(layer.attn(layer.ln1(x)) for layer in layers)
        end = middle
        for layer in layers:
            end = end + layer.ffn(layer.ln2(middle)) - layer.ln2(middle)
        assert relative_error(block(x), end) < 1e-5
    for key in ('ln1.weight', 'pos_embed', 'patch_embed.projection.weight'):
        assert torch.equal(model.state_dict()[key], ordinary.state_dict()[key])


def test_layers_of_one_grid_fill_a_block_of_swin(randomize, relative_error, tmp_path):
    ordinary = randomize(SwinTransformer(swin_arch([2, 2, 12, 2]), **WINDOWS))
    ordinary.eval()
    for name, p in ordinary.named_parameters():
        if 'table' in name:
            torch.nn.init.normal_(p)
    model = filled(
        ParallelSwinTransformer, swin_arch([2, 2, 4, 2]), ordinary, tmp_path / 'swin.pth',
        num_branches=(1, 1, 3, 1), **WINDOWS,
    )  # fmt: skip
    # A map of whole windows: padding is not normalized.
    x, shape = torch.randn(2, 64, 32), (8, 8)
    for k, numbers in enumerate([(0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11)]):
        layers = [ordinary.stages[2].blocks[j] for j in numbers]
        assert {layer.attn.shift_size for layer in layers} == {2 * (k % 2)}
        block = model.stages[2].blocks[k]
        middle = x + sum(layer.attn(layer.norm1(x), shape) for layer in layers)
        end = middle
        for layer in layers:
            end = end + layer.ffn(layer.norm2(middle)) - layer.norm2(middle)
        assert relative_error(block(x, shape), end) < 1e-5
    with_branches = {
        name.split('.')[1] for name, m in model.named_modules() if isinstance(m, ParallelAttention)
    }
    assert with_branches == {'2'}
    assert type(model.stages[0].blocks[0].attn) is FastShiftWindowMSA


def test_layers_that_cannot_be_branches(tmp_path):
    few = VisionTransformer(vit_arch(4), **VIT)
    with pytest.raises(CheckpointError, match="'layers.4.*lacks"):
        filled(
            ParallelVisionTransformer, vit_arch(2), few, tmp_path / 'few.pth', num_branches=3, **VIT
        )
    plain = dict(VIT, qkv_bias=False)
    without_bias = VisionTransformer(vit_arch(6), **plain)
    for layer in without_bias.layers:
        torch.nn.init.ones_(layer.ln1.bias)
    with pytest.raises(ValueError, match='no bias for the shift'):
        filled(
            ParallelVisionTransformer, vit_arch(2), without_bias, tmp_path / 'plain.pth',
            num_branches=3, **plain,
        )  # fmt: skip


def test_arch_counts_layers_by_name_and_blocks_in_a_dict():
    with torch.device('meta'):
        for name, width in (('vit-tiny', 192), ('vit-s', 384), ('base', 768)):
            model = ParallelVisionTransformer(name, num_branches=3)
            assert len(model.layers) == 4 and model.embed_dims == width
            assert model.layers[0].attn.num_branches == 3
    assert len(ParallelVisionTransformer(vit_arch(5), num_branches=2, **VIT).layers) == 5
    assert ParallelSwinTransformer('small', num_branches=3).depths == [2, 2, 6, 2]


@pytest.mark.parametrize(
    'build, message',
    [
        (lambda: ParallelVisionTransformer('vit-tiny', num_branches=5), '12 layers of vit-tiny'),
        (lambda: ParallelVisionTransformer(vit_arch(2), num_branches=-1), '1 branch or more'),
        (lambda: ParallelSwinTransformer('small', num_branches=4), 'no stage of .* has branches'),
        (lambda: ParallelSwinTransformer('small', num_branches=(1, 2, 3, 1)), 'stage 1 of .small'),
        (
            lambda: ParallelVisionTransformer(
                vit_arch(2), num_branches=2, layer_cfgs=dict(ffn_type='swiglu_fused')
            ),
            'SwiGLUFFNFused is not',
        ),
    ],
)
def test_branches_that_cannot_be(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_norms_before_branches_neither_scale_nor_shift(randomize, relative_error):
    """Scales and shifts are in the matrices of the branches; a norm may be in another module."""
    ordinary = randomize(VisionTransformer(vit_arch(4), **VIT))
    model = randomize(ParallelVisionTransformer(vit_arch(2), num_branches=2, **VIT))
    other = copy.deepcopy(model)
    for layer in other.layers:
        layer.ln1, layer.ln2 = nn.Sequential(layer.ln1), nn.Sequential(layer.ln2)
    outputs = []
    for each in (model, other):
        each.fill(ordinary)
        each.eval()
        outputs.append(each(torch.ones(2, 3, 32, 32))[0])
    assert relative_error(*outputs) < 1e-6


@pytest.mark.parametrize(
    'first, second, label',
    [
        ('Branches', 'Branches', 'parallel attention'),
        ('Branches', 'ChannelIdle', 'parallel FFN'),
        ('ChannelIdle', 'Branches', 'channel-idle FFN'),
    ],
)
def test_a_site_takes_one_form(first, second, label, monkeypatch):
    monkeypatch.setitem(test_structures.FFN_FORMS, first, label)
    test_structures.test_a_site_takes_one_form(first, second)


def test_an_attention_with_a_form_inside_takes_no_branches():
    model = VisionTransformer(vit_arch(2), **VIT)
    model.layers[1].attn.qkv = TrainingForm()
    with pytest.raises(ValueError, match="'layers.1.attn'.* there is a mergeable module already"):
        add_structures_(model, [dict(type='Branches')])


def test_branches_of_other_numbers_in_each_block_are_not_filled(tmp_path):
    torch.save(VisionTransformer(vit_arch(4), **VIT).state_dict(), tmp_path / 'vit.pth')
    structures = [dict(type='Branches', num_branches=[2, 2, 1, 1])]
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'vit.pth'))
    model = RestructuredViT(vit_arch(4), structures=structures, init_cfg=init_cfg, **VIT)
    with pytest.raises(ValueError, match='as many in each block'):
        model.init_weights()


def test_frozen_stages_freeze_their_branches():
    for stages, trains in ((-1, True), (1, False)):
        model = ParallelVisionTransformer(vit_arch(1), frozen_stages=stages, **VIT)
        assert all(p.requires_grad is trains for p in model.layers[0].ffn.parameters())


CONFIGS = [f'parallel_vit_t_{number}_in1k' for number in (3, 4, 6)] + ['parallel_swin_s_in1k']


@pytest.mark.parametrize(
    'name', [CONFIGS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS[1:])]
)
def test_the_config_trains_a_step_and_merges(name, relative_error):
    test_configs.test_model_trains_a_step_and_merges(config(name), relative_error)


@pytest.mark.parametrize('name', CONFIGS)
def test_the_recipe_is_that_of_the_ordinary_model(name):
    """But for the schedule and the hook that tests the merged model."""
    hooks = 'custom_hooks', 'default_hooks', 'custom_imports', 'pretrained', 'model'
    ordinary = 'swin_s_in1k' if 'swin' in name else config('vit_t_in1k')
    cfg, ordinary = load(config(name)), load(ordinary)
    assert cfg.custom_hooks == [dict(type='ScheduleHook', warmup=10000)]
    assert cfg.default_hooks.pop('reparameterize') == dict(type='ReparameterizeHook')
    assert cfg.default_hooks == ordinary.default_hooks
    assert {key: cfg[key] for key in cfg if key not in hooks} == {
        key: ordinary[key] for key in ordinary if key not in hooks
    }


def test_pretraining_leads_to_the_classifier(tmp_path):
    """A masked autoencoder with branches trains a step, and its weights start the classifier."""
    cfg = load(config('parallel_vit_t_3_mae'))
    cfg.model.neck.update(decoder_depth=1, decoder_embed_dim=64)
    model = MODELS.build(cfg.model)
    model.init_weights()
    model.train()
    optim_wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    images = torch.randint(256, (2, 3, 224, 224), dtype=torch.uint8)
    data = model.data_preprocessor(dict(inputs=images, data_samples=[None] * 2), training=True)
    optim_wrapper.backward(model(data['inputs'], None, mode='loss')['loss'])
    assert not [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    optim_wrapper.step()
    path = str(tmp_path / 'mae.pth')
    torch.save(dict(state_dict=model.state_dict()), path)
    cfg = load(config('parallel_vit_t_3_in1k'))
    cfg.model.backbone.init_cfg.checkpoint = path
    classifier = MODELS.build(cfg.model)
    classifier.init_weights()
    loaded = classifier.backbone.state_dict()
    # Mean features have a norm of their own.
    for key in set(loaded) - {'ln2.weight', 'ln2.bias'}:
        assert torch.equal(loaded[key], model.backbone.state_dict()[key]), key


def test_in_the_tools(in_digits, call):  # noqa: F811
    backbone = (
        "type='ParallelSwinTransformer', num_branches=2, window_size=3, "
        'arch=dict(embed_dims=24, depths=[2, 2, 2, 2], num_heads=[1, 2, 2, 2])'
    )
    hook, project = "dict(type='ScheduleHook', warmup=1)", 'projects.depth_reparameterization'
    path = in_digits / 'parallel.py'
    config = structures_in_tools.write_config(path, backbone, [48, 96, 192], hook, project)
    structures_in_tools.check_merging_before_the_end_is_refused(config, in_digits, call)
    structures_in_tools.train_merge_and_test(config, in_digits, call)
