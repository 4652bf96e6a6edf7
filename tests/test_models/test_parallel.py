"""Backbones with parallel branches, and the ordinary ones that they become."""

import pytest
import torch
from mmengine.registry import MODELS
from mmengine.runner.checkpoint import load_state_dict
from mmpretrain.models import SwinTransformer, VisionTransformer

from repa_mm.benchmark.paper import OnMeta
from repa_mm.models import ParallelMAEViT, ParallelSwinTransformer, ParallelVisionTransformer
from repa_mm.models.attention import FastShiftWindowMSA
from repa_mm.reparam import (
    CheckpointError,
    Form,
    MergedFFN,
    ParallelAttention,
    ParallelIdleFFN,
    join_branches,
    reparameterize,
)


def vit_arch(num_layers):
    return dict(embed_dims=16, num_layers=num_layers, num_heads=2, feedforward_channels=40)


def swin_arch(depths):
    return dict(embed_dims=8, depths=depths, num_heads=[1, 2, 2, 4])


VIT = dict(img_size=32, patch_size=8, out_type='featmap')
SWIN = dict(window_size=4, img_size=64, pad_small_map=True, out_indices=(0, 1, 2, 3))


def parallel_vit(num_layers=2, num_branches=3, **kwargs):
    return ParallelVisionTransformer(
        vit_arch(num_layers), num_branches=num_branches, **dict(VIT, **kwargs)
    )


def parallel_swin(depths=(2, 2, 4, 2), num_branches=(1, 1, 3, 1), **kwargs):
    return ParallelSwinTransformer(
        swin_arch(list(depths)), num_branches=num_branches, **dict(SWIN, **kwargs)
    )


def check_same(actual, expected, relative_error, bound=1e-6):
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected):
        assert relative_error(a, e) < bound


@pytest.mark.parametrize('layer_scale', [0.0, 0.1])
@pytest.mark.parametrize('num_branches', [1, 2, 3])
def test_merged_vit_is_mmpretrains(num_branches, layer_scale, randomize, relative_error, tmp_path):
    model = parallel_vit(
        num_branches=num_branches, layer_scale_init_value=layer_scale, drop_path_rate=0.3
    )
    join_branches(randomize(model).eval(), 1)
    torch.save(reparameterize(model).state_dict(), tmp_path / 'merged.pth')
    ordinary = VisionTransformer(vit_arch(2), **VIT)
    ordinary.load_state_dict(torch.load(tmp_path / 'merged.pth'), strict=True)
    ordinary.eval()
    # Another size: the position embedding is resized.
    for size in (32, 48):
        x = torch.randn(2, 3, size, size)
        check_same(ordinary(x), model(x), relative_error)
        check_same(reparameterize(model)(x), model(x), relative_error)


@pytest.mark.parametrize('pad_small_map, size', [(True, 64), (True, 50), (True, 20), (False, 128)])
def test_merged_swin_is_mmpretrains(pad_small_map, size, randomize, relative_error):
    model = parallel_swin(num_branches=2, pad_small_map=pad_small_map)
    join_branches(randomize(model).eval(), 1)
    merged = reparameterize(model)
    ordinary = SwinTransformer(swin_arch([2, 2, 4, 2]), **dict(SWIN, pad_small_map=pad_small_map))
    ordinary.load_state_dict(merged.state_dict(), strict=True)
    ordinary.eval()
    x = torch.randn(2, 3, size, size)
    expected = model(x)
    check_same(ordinary(x), expected, relative_error)
    with torch.no_grad():
        check_same(merged(x), expected, relative_error)
    fast = [m for m in merged.modules() if isinstance(m, FastShiftWindowMSA)]
    assert len(fast) == 10


def test_stages_without_branches_are_ordinary():
    model = parallel_swin()
    with_branches = {
        name.split('.')[1] for name, m in model.named_modules() if isinstance(m, ParallelAttention)
    }
    assert with_branches == {'2'}
    assert type(model.stages[0].blocks[0].attn) is FastShiftWindowMSA


def test_arch_counts_layers_by_name_and_blocks_in_a_dict():
    for name, width in (('vit-tiny', 192), ('vit-s', 384), ('deit-base', 768), ('base', 768)):
        with OnMeta():
            model = ParallelVisionTransformer(name, num_branches=3)
        assert len(model.layers) == 4 and model.embed_dims == width
        assert model.layers[0].attn.num_branches == 3
    assert len(parallel_vit(5, 2).layers) == 5
    with OnMeta():
        assert ParallelSwinTransformer('small', num_branches=3).depths == [2, 2, 6, 2]
        assert ParallelSwinTransformer('tiny', num_branches=[1, 1, 3, 1]).depths == [2, 2, 2, 2]
    assert parallel_swin(num_branches=2).num_branches == [2, 2, 2, 2]


@pytest.mark.parametrize(
    'make, message',
    [
        (lambda: ParallelVisionTransformer('vit-tiny', num_branches=5), '12 layers of vit-tiny'),
        (lambda: ParallelVisionTransformer('vit-tiny', num_branches=0), '1 branch or more'),
        (lambda: parallel_vit(num_branches=-1), '1 branch or more'),
        (lambda: ParallelSwinTransformer('small', num_branches=4), 'no stage of .* has branches'),
        (lambda: ParallelSwinTransformer('small', num_branches=(1, 2, 3, 1)), 'stage 1 of .small'),
        (lambda: ParallelSwinTransformer('small', num_branches=(1, 3)), '2 entries for 4 stages'),
        (lambda: ParallelSwinTransformer('small', num_branches=2.5), '1 branch or more'),
        (lambda: parallel_vit(layer_cfgs=dict(ffn_type='swiglu_fused')), 'SwiGLUFFNFused is not'),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message), OnMeta():
        make()


@pytest.mark.parametrize('kind', ['vit', 'swin'])
@pytest.mark.parametrize('norm', ['BN', 'LN', 'keep'])
def test_depth_and_width_compose(kind, norm, randomize, relative_error):
    make = parallel_vit if kind == 'vit' else parallel_swin
    model = make(idle_ratio=0.75, ffn_norm_cfg=dict(type=norm), drop_path_rate=0.2)
    join_branches(randomize(model).eval(), 1)
    x = torch.randn(2, 3, 50, 50)
    deployed = reparameterize(model)
    check_same(deployed(x), model(x), relative_error)
    wide = [m for m in model.modules() if isinstance(m, ParallelIdleFFN)]
    merged = [m for m in deployed.modules() if isinstance(m, MergedFFN)]
    assert (len(wide), len(merged)) == ((2, 2) if kind == 'vit' else (4, 10))
    # As many active channels as without branches.
    one = parallel_vit(num_branches=1, idle_ratio=0.75, deploy=True)
    if kind == 'vit':
        assert merged[0].fc1.weight.shape == one.layers[0].ffn.fc1.weight.shape
    built = make(idle_ratio=0.75, ffn_norm_cfg=dict(type=norm), deploy=True)
    built.load_state_dict(deployed.state_dict())
    check_same(built.eval()(x), model(x), relative_error)


def test_ordinary_layers_fill_the_branches(randomize, relative_error):
    """Each branch computes of the block's input what its layer does."""
    ordinary = randomize(VisionTransformer(vit_arch(6), layer_scale_init_value=0.5, **VIT))
    ordinary.eval()
    for layer in ordinary.layers:
        torch.nn.init.uniform_(layer.attn.gamma1.weight, -1, 1)
        torch.nn.init.uniform_(layer.ffn.gamma2.weight, -1, 1)
    for kwargs in (dict(layer_scale_init_value=1e-5), {}):
        model = parallel_vit(2, 3, **kwargs).eval()
        # As mmengine loads, which is not strict.
        load_state_dict(model, ordinary.state_dict(), strict=False)
        x = torch.randn(2, 17, 16)
        for i, block in enumerate(model.layers):
            layers = ordinary.layers[3 * i : 3 * i + 3]
            middle = x + sum(layer.attn(layer.ln1(x)) for layer in layers)
            end = middle
            for layer in layers:
                end = end + layer.ffn(layer.ln2(middle)) - layer.ln2(middle)
            check_same([block(x)], [end], relative_error, 1e-5)
        same = ('ln1.weight', 'pos_embed', 'patch_embed.projection.weight')
        for key in same:
            assert torch.equal(model.state_dict()[key], ordinary.state_dict()[key])
    # One branch: the ordinary ViT.
    model = parallel_vit(6, 1, layer_scale_init_value=1.0).eval()
    load_state_dict(model, ordinary.state_dict(), strict=True)
    image = torch.randn(2, 3, 32, 32)
    check_same(model(image), ordinary(image), relative_error, 1e-5)


def test_layers_of_one_grid_fill_a_block_of_swin(randomize, relative_error):
    ordinary = randomize(SwinTransformer(swin_arch([2, 2, 12, 2]), **SWIN))
    ordinary.eval()
    for name, p in ordinary.named_parameters():
        if 'table' in name:
            torch.nn.init.normal_(p)
    model = parallel_swin((2, 2, 4, 2), (1, 1, 3, 1)).eval()
    load_state_dict(model, ordinary.state_dict(), strict=True)
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
        check_same([block(x, shape)], [end], relative_error, 1e-5)


def test_tables_of_other_windows_are_resized(randomize):
    ordinary = randomize(SwinTransformer(swin_arch([2, 2, 12, 2]), **SWIN))
    model = parallel_swin((2, 2, 4, 2), (1, 1, 3, 1), window_size=6)
    model.load_state_dict(ordinary.state_dict(), strict=True)
    trained = parallel_swin((2, 2, 4, 2), (1, 1, 3, 1))
    model.load_state_dict(trained.state_dict(), strict=True)
    assert model.stages[2].blocks[0].attn.w_msa.relative_position_bias_table.shape == (121, 6)


def test_checkpoints_that_do_not_fit(randomize):
    model = parallel_vit(2, 3)
    merged = reparameterize(join_branches(parallel_vit(2, 3), 1)).state_dict()
    with pytest.raises(CheckpointError, match='is reparameterized'):
        model.load_state_dict(merged)
    with pytest.raises(CheckpointError, match='has 4 layers .* 2 blocks of 3 branches for 6'):
        model.load_state_dict(VisionTransformer(vit_arch(4), **VIT).state_dict())
    with pytest.raises(CheckpointError, match='training form'):
        parallel_vit(2, 3, deploy=True).load_state_dict(model.state_dict())
    with pytest.raises(CheckpointError, match='layers.2.attn. and the model has none'):
        parallel_vit(2, 3, deploy=True).load_state_dict(
            VisionTransformer(vit_arch(6), **VIT).state_dict()
        )
    unequal = VisionTransformer(
        vit_arch(6), layer_cfgs=[{}] * 4 + [dict(feedforward_channels=48)] * 2, **VIT
    )
    with pytest.raises(CheckpointError, match='unequal width: ffn.layers.0.0.weight has the shape'):
        model.load_state_dict(unequal.state_dict())
    with pytest.raises(CheckpointError, match='ordinary FFN'):
        parallel_vit(2, 3, idle_ratio=0.5).load_state_dict(
            VisionTransformer(vit_arch(6), **VIT).state_dict()
        )
    without_bias = randomize(VisionTransformer(vit_arch(6), qkv_bias=False, **VIT))
    with pytest.raises(CheckpointError, match='no bias for the shift'):
        parallel_vit(2, 3, qkv_bias=False).load_state_dict(without_bias.state_dict())


@pytest.mark.parametrize('scope', ['mmpretrain', 'mmdet', 'mmseg'])
def test_registered(scope):
    pytest.importorskip(scope)
    for name in ('ParallelVisionTransformer', 'ParallelMAEViT', 'ParallelSwinTransformer'):
        registry = __import__(f'{scope}.registry', fromlist=['MODELS']).MODELS
        assert registry.get(name).__name__ == name


def test_masked_autoencoder(randomize):
    model = MODELS.build(
        dict(type='ParallelMAEViT', arch=vit_arch(2), img_size=32, patch_size=8, num_branches=2)
    )
    model.init_weights()
    latent, mask, _ = model.train()(torch.randn(2, 3, 32, 32))
    assert latent.shape == (2, 5, 16) and mask.mean() == 0.75
    latent.sum().backward()
    assert isinstance(model, ParallelMAEViT)
    # The classifier that is fine-tuned has the same names.
    classifier = parallel_vit(2, 2)
    classifier.load_state_dict(model.state_dict(), strict=True)


@pytest.mark.parametrize('make', [parallel_vit, parallel_swin])
def test_initialized_frozen_and_trained(make):
    model = make(frozen_stages=1, drop_path_rate=0.1)
    model.init_weights()
    assert model.train() is model
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert any('branches' in n or 'stages.0' in n for n in frozen)
    sum(out.sum() for out in model(torch.randn(2, 3, 64, 64))).backward()
    without = {n for n, p in model.named_parameters() if p.grad is None}
    assert without == frozen


def test_activation_checkpointing(randomize, relative_error):
    model = randomize(parallel_swin(with_cp=True, drop_path_rate=0.0)).train()
    other = parallel_swin(drop_path_rate=0.0).train()
    other.load_state_dict(model.state_dict())
    x = torch.randn(1, 3, 64, 64, requires_grad=True)
    grads = []
    for each in (model, other):
        sum(out.square().sum() for out in each(x)).backward()
        grads.append([p.grad for p in each.parameters()])
    check_same(*grads, relative_error, 1e-5)


def test_single_branches_are_forms():
    """They take part in checkpoints and merging as several do."""
    model = parallel_vit(2, 1)
    assert any(isinstance(m, Form) for m in model.modules())
    with pytest.raises(ValueError, match='lambda = 0'):
        reparameterize(model)
