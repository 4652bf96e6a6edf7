"""Backbones with experts and without mixers, and the ordinary ones that they become."""

import pytest
import torch
from mmengine.runner.checkpoint import load_state_dict
from mmpretrain.models import PoolFormer, RIFormer, VisionTransformer

from repa_mm.models import AffineRIFormer, ExpertsVisionTransformer, RePaVisionTransformer
from repa_mm.reparam import CheckpointError, ExpertLinear, MergedFFN, NormedAffine, reparameterize

VIT = dict(
    arch=dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=40),
    img_size=32,
    patch_size=8,
    out_type='featmap',
)
POOL = dict(arch=dict(layers=[1, 1, 2, 1], embed_dims=[4, 8, 12, 16]), out_indices=[0, 2, 4, 6])


def scattered(model, randomize):
    randomize(model)
    for name, p in model.named_parameters():
        if 'norm' in name or 'layer_scale' in name or 'affine' in name:
            torch.nn.init.uniform_(p, 0.3, 1.5)
    model.eval()
    return model


def check_same(actual, expected, relative_error, bound=1e-5):
    for a, e in zip(actual, expected, strict=True):
        assert relative_error(a, e) < bound


@pytest.mark.parametrize('idle_ratio, norm', [(None, 'BN'), (0.75, 'BN'), (0.75, 'keep')])
def test_experts_merge_into_mmpretrains_vit(idle_ratio, norm, randomize, relative_error):
    kwargs = dict(VIT, num_experts=3, idle_ratio=idle_ratio, ffn_norm_cfg=dict(type=norm))
    model = scattered(ExpertsVisionTransformer(**kwargs, drop_path_rate=0.2), randomize)
    x = torch.randn(2, 3, 32, 32)
    expected, deployed = model(x), reparameterize(model)
    check_same(deployed(x), expected, relative_error)
    if idle_ratio:
        assert sum(isinstance(m, MergedFFN) for m in deployed.modules()) == 2
        ordinary = ExpertsVisionTransformer(**kwargs, deploy=True)
    else:
        ordinary = VisionTransformer(**VIT)
    ordinary.load_state_dict(deployed.state_dict(), strict=True)
    ordinary.eval()
    check_same(ordinary(x), expected, relative_error)
    with pytest.raises(CheckpointError, match='reparameterized'):
        ExpertsVisionTransformer(**kwargs).load_state_dict(deployed.state_dict())


def test_affine_mixers_merge_into_mmpretrains_riformer(randomize, relative_error):
    model = scattered(AffineRIFormer(**POOL), randomize)
    assert sum(isinstance(m, NormedAffine) for m in model.modules()) == 5
    x = torch.randn(2, 3, 64, 64)
    deployed = reparameterize(model)
    check_same(deployed(x), model(x), relative_error)
    ordinary = RIFormer(**POOL, deploy=True)
    ordinary.load_state_dict(deployed.state_dict(), strict=True)
    ordinary.eval()
    check_same(ordinary(x), model(x), relative_error)
    built = AffineRIFormer(**POOL, deploy=True)
    built.load_state_dict(deployed.state_dict(), strict=True)
    with pytest.raises(CheckpointError, match='reparameterized'):
        AffineRIFormer(**POOL).load_state_dict(deployed.state_dict())


def test_weights_of_riformer_and_poolformer_load(randomize, relative_error):
    ordinary = scattered(RIFormer(**POOL), randomize)
    model = AffineRIFormer(**POOL)
    load_state_dict(model, ordinary.state_dict(), strict=True)
    model.eval()
    x = torch.randn(2, 3, 64, 64)
    check_same(model(x), ordinary(x), relative_error)
    pool = scattered(PoolFormer(**POOL), randomize)
    load_state_dict(model, pool.state_dict(), strict=True)
    for key in ('network.0.0.mlp.fc1.weight', 'network.4.1.norm2.weight'):
        assert torch.equal(model.state_dict()[key], pool.state_dict()[key])
    deeper = dict(POOL, arch=dict(POOL['arch'], layers=[1, 1, 3, 1]))
    with pytest.raises(CheckpointError, match='has network.4.2 and the model 2 of these blocks'):
        load_state_dict(model, PoolFormer(**deeper).state_dict())


@pytest.mark.parametrize('layer_scale', [0.0, 0.1])
@pytest.mark.parametrize('start', ['ordinary', 'scaled', 'idle'])
def test_begins_as_an_ordinary_vit(start, layer_scale, randomize, relative_error, tmp_path):
    kwargs = dict(VIT, num_experts=3, layer_scale_init_value=layer_scale)
    if start == 'idle':
        kwargs['idle_ratio'] = 0.5
        ordinary = RePaVisionTransformer(**VIT, idle_ratio=0.5, layer_scale_init_value=layer_scale)
    else:
        ordinary = VisionTransformer(**VIT, layer_scale_init_value=0.1 * (start == 'scaled'))
    scattered(ordinary, randomize)
    if start == 'scaled':
        for layer in ordinary.layers:  # which the attention would miss without layer scale
            torch.nn.init.ones_(layer.attn.gamma1.weight)
            torch.nn.init.uniform_(layer.ffn.gamma2.weight, 0.3, 1.5)
    path = str(tmp_path / 'vit.pth')
    weights = {f'backbone.{key}': value for key, value in ordinary.state_dict().items()}
    torch.save(dict(state_dict=weights), path)
    init_cfg = dict(type='Pretrained', checkpoint=path, prefix='backbone.')
    model = ExpertsVisionTransformer(**kwargs, init_cfg=init_cfg)
    model.init_weights()
    if start == 'ordinary' and layer_scale:
        for layer in model.layers:
            torch.nn.init.ones_(layer.attn.gamma1.weight)
    model.eval()
    x = torch.randn(2, 3, 32, 32)
    check_same(model(x), ordinary(x), relative_error)
    check_same(reparameterize(model)(x), ordinary(x), relative_error)
    for m in model.modules():
        if isinstance(m, ExpertLinear):
            assert len(m.experts) == 3
            assert torch.equal(m.experts[0].weight, m.experts[2].weight)
    # A training that goes on, or a test, has weights of experts.
    if start != 'idle':
        with pytest.raises(CheckpointError, match='reparameterized|another architecture'):
            ExpertsVisionTransformer(**kwargs).load_state_dict(ordinary.state_dict())


def test_a_frozen_stage_computes_with_the_mean():
    model = ExpertsVisionTransformer(**VIT, num_experts=2, frozen_stages=1).train()
    x = torch.randn(2, 17, 16)
    first, second = model.layers[0].ffn, model.layers[1].ffn
    assert torch.equal(first(x), first(x)) and not torch.equal(second(x), second(x))


@pytest.mark.parametrize(
    'make',
    [
        lambda: ExpertsVisionTransformer(**VIT, num_experts=2),
        lambda: ExpertsVisionTransformer(**VIT, num_experts=2, idle_ratio=0.5),
        lambda: AffineRIFormer(**POOL, drop_path_rate=0.1),
    ],
)
def test_trains(make):
    model = make()
    model.init_weights()
    assert model.train() is model
    sum(out.square().sum() for out in model(torch.randn(2, 3, 64, 64))).backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None]


def test_bad_input():
    with pytest.raises(ValueError, match='1 expert or more'):
        ExpertsVisionTransformer(**VIT, num_experts=0)
    with pytest.raises(ValueError, match='and not a GroupNorm'):
        AffineRIFormer(**dict(POOL, norm_cfg=dict(type='BN')))
