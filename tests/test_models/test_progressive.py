"""Backbones with progressive norms: they begin as ordinary ones and merge without norms."""

import pytest
import torch
import torch.nn as nn
from mmengine.model.utils import revert_sync_batchnorm
from mmengine.runner.checkpoint import load_state_dict
from mmpretrain.models import SwinTransformer, VisionTransformer
from repa_mm.models.surgery.norms import progressive_activations, progressive_norms

from repa_mm.models import ProgressiveSwinTransformer, ProgressiveVisionTransformer
from repa_mm.reparam import (
    AffineMap,
    CheckpointError,
    MergedFFN,
    ProgressiveIdleFFN,
    TrainingForm,
    finish_schedules,
    reparameterize,
)

VIT = dict(
    arch=dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=40),
    img_size=32,
    patch_size=8,
    out_type='featmap',
)
SWIN = dict(
    arch=dict(embed_dims=8, depths=[2, 2, 2, 2], num_heads=[1, 2, 2, 4]),
    window_size=4,
    img_size=64,
    pad_small_map=True,
    out_indices=(0, 1, 2, 3),
    drop_path_rate=0.1,
)
KINDS = dict(
    vit=(ProgressiveVisionTransformer, VisionTransformer, VIT),
    swin=(ProgressiveSwinTransformer, SwinTransformer, SWIN),
)


def scattered(model, randomize):
    randomize(model)
    for name, p in model.named_parameters():
        if name.endswith(('eta', 'slope', 'offset', 'bias_table')):
            nn.init.uniform_(p, -1, 1)
    model.eval()
    return model


def check_same(actual, expected, relative_error, bound=1e-5):
    for a, e in zip(actual, expected, strict=True):
        assert relative_error(a, e) < bound


@pytest.mark.parametrize('size', [64, 50, 20])
@pytest.mark.parametrize(
    'kind, kwargs',
    [
        ('vit', {}),
        ('swin', {}),
        ('vit', dict(idle_ratio=0.75)),
        ('swin', dict(idle_ratio=0.75, progressive_activations=True)),
    ],
)
def test_merged_without_norms(kind, kwargs, size, randomize, relative_error):
    make, _, args = KINDS[kind]
    model = finish_schedules(scattered(make(**args, **kwargs), randomize))
    deployed = reparameterize(model)
    x = torch.randn(2, 3, size, size)
    with torch.no_grad():
        expected = model(x)
        check_same(deployed(x), expected, relative_error)
    # Window attention has another path for gradients.
    check_same(deployed(x), expected, relative_error)
    check_same(model(x), expected, relative_error)
    blocks = deployed.layers if kind == 'vit' else [b for s in deployed.stages for b in s.blocks]
    left = TrainingForm, nn.LayerNorm, nn.BatchNorm1d
    assert not any(isinstance(m, left) for block in blocks for m in block.modules())
    assert any(isinstance(m, MergedFFN) for m in deployed.modules()) == bool(kwargs)
    built = make(**args, **kwargs, deploy=True)
    built.load_state_dict(deployed.state_dict(), strict=True)
    built.eval()
    with torch.no_grad():
        check_same(built(x), expected, relative_error)


@pytest.mark.parametrize('change', [revert_sync_batchnorm, nn.SyncBatchNorm.convert_sync_batchnorm])
def test_synchronized_norms_merge(change, randomize, relative_error):
    sync = change is revert_sync_batchnorm
    model = ProgressiveVisionTransformer(**VIT, bn_cfg=dict(type='SyncBN' if sync else 'BN'))
    model = finish_schedules(scattered(change(model), randomize))
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        check_same(reparameterize(model)(x), model(x), relative_error)


def test_padding_is_not_normalized_in_a_traced_graph(randomize, relative_error):
    model = finish_schedules(scattered(ProgressiveSwinTransformer(**SWIN), randomize))
    deployed = reparameterize(model)
    x = torch.randn(2, 3, 50, 50)
    with torch.no_grad():
        traced = torch.jit.trace(deployed, x, check_trace=False)
        check_same(traced(x), model(x), relative_error)


@pytest.mark.parametrize('kind', KINDS)
def test_begins_as_the_ordinary_backbone(kind, randomize, relative_error):
    make, ordinary, args = KINDS[kind]
    ordinary = scattered(ordinary(**args), randomize)
    model = make(**args)
    load_state_dict(model, ordinary.state_dict(), strict=True)
    model.eval()
    x = torch.randn(2, 3, 50, 50)
    with torch.no_grad():
        check_same(model(x), ordinary(x), relative_error)
    other = make(**args)
    load_state_dict(other, model.state_dict(), strict=True)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('finished', [False, True])
def test_trains(kind, finished):
    make, _, args = KINDS[kind]
    model = make(**args, idle_ratio=0.5, progressive_activations=True)
    model.init_weights()
    if finished:
        finish_schedules(model)
    assert model.train() is model
    sum(out.square().sum() for out in model(torch.randn(2, 3, 64, 64))).backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None]


def test_activations_fade_in_any_model(randomize, relative_error):
    model = ProgressiveVisionTransformer(**VIT, idle_ratio=0.5)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    names = progressive_activations(model)
    assert names == ['layers.0.ffn', 'layers.1.ffn']
    form = model.layers[0].ffn
    assert isinstance(form, ProgressiveIdleFFN) and form.num_active == 20
    assert torch.equal(form.fc1.weight, weights['layers.0.ffn.fc1.weight'])
    assert torch.equal(form.fc2.weight, weights['layers.0.ffn.fc2.weight'])


def test_norms_of_other_ffns_become_affine_maps(randomize, relative_error):
    swiglu = dict(VIT, layer_cfgs=dict(ffn_type='swiglu_fused'))
    ordinary = scattered(VisionTransformer(**swiglu), randomize)
    model = ProgressiveVisionTransformer(**swiglu)
    load_state_dict(model, ordinary.state_dict(), strict=True)
    model.eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        check_same(model(x), ordinary(x), relative_error)
        finish_schedules(scattered(model, randomize))
        deployed = reparameterize(model)
        check_same(deployed(x), model(x), relative_error)
    assert isinstance(deployed.layers[0].ln2, AffineMap)
    built = ProgressiveVisionTransformer(**swiglu, deploy=True)
    built.load_state_dict(deployed.state_dict(), strict=True)


@pytest.mark.parametrize('kind', KINDS)
def test_checkpoints_that_do_not_fit(kind):
    make, ordinary, args = KINDS[kind]
    model = finish_schedules(make(**args))
    merged = reparameterize(model).state_dict()
    with pytest.raises(CheckpointError, match='is reparameterized'):
        load_state_dict(model, merged, strict=False)
    built = make(**args, deploy=True)
    # A merged model has no place for norms: those of an ordinary one cannot be dropped.
    for weights, message in (
        (model.state_dict(), 'in the training form'),
        (ordinary(**args).state_dict(), 'has no .*qkv.weight: it is of another architecture'),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_state_dict(built, weights, strict=False)


@pytest.mark.parametrize('kind', KINDS)
def test_a_deeper_ordinary_backbone_is_refused(kind):
    """Its first blocks would fit, and MMEngine drops the others with a warning."""
    make, ordinary, args = KINDS[kind]
    arch = dict(args['arch'])
    arch.update(dict(num_layers=3) if kind == 'vit' else dict(depths=[2, 2, 6, 2]))
    weights = ordinary(**dict(args, arch=arch)).state_dict()
    name = 'layers.2' if kind == 'vit' else 'stages.2.blocks.2'
    with pytest.raises(CheckpointError, match=f'has {name} and the model 2 of these blocks'):
        load_state_dict(make(**args), weights, strict=False)


@pytest.mark.parametrize('stages', [0, 1])
def test_frozen_stages(stages):
    """From the start, so that DistributedDataParallel knows of it."""
    model = ProgressiveSwinTransformer(**SWIN, frozen_stages=stages)
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    expected = {n for n, _ in model.named_parameters() if n.startswith('stages.0.')}
    assert expected <= frozen and any('.rep.eta' in n for n in frozen)
    before = {k: v.clone() for k, v in model.stages[0].named_buffers()}
    model.train()(torch.randn(2, 3, 64, 64))
    assert all(torch.equal(v, before[k]) for k, v in model.stages[0].named_buffers())


def test_bad_input():
    with pytest.raises(ValueError, match='has no channel-idle FFN'):
        ProgressiveVisionTransformer(**VIT, progressive_activations=True)
    with pytest.raises(ValueError, match='no LayerNorm in a block'):
        progressive_norms(nn.Linear(2, 2))
    with pytest.raises(ValueError, match='lambda = 1'):
        reparameterize(ProgressiveVisionTransformer(**VIT))
