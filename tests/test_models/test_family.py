"""Every registered RePa backbone through the same checks."""

import copy

import pytest
import torch
from mmengine.registry import MODELS
from mmengine.runner.checkpoint import load_state_dict
from torch.nn.modules.batchnorm import _BatchNorm

import repa_mm
from repa_mm.engine.complexity import count_parameters
from repa_mm.reparam import ChannelIdleFFN, CheckpointError, MergedFFN, set_training_path

VIT = dict(embed_dims=32, num_layers=3, num_heads=4, feedforward_channels=96)
POOL = dict(
    layers=[1, 1, 2, 1], embed_dims=[8, 16, 24, 32], mlp_ratios=[4] * 4, layer_scale_init_value=0.1
)

# The vanilla backbone, arguments, a batch, its features, and the widths C and
# H of the FFNs. The images are not of the size that the models are made for
# where other sizes are possible.
FAMILY = dict(
    RePaSwinTransformer=(
        'mmpretrain.SwinTransformer',
        dict(
            arch=dict(embed_dims=8, depths=[1, 1, 2, 1], num_heads=[1, 2, 2, 4]),
            out_indices=(0, 1, 2, 3),
            pad_small_map=True,
        ),
        (2, 3, 64, 96),
        [(2, 8, 16, 24), (2, 16, 8, 12), (2, 32, 4, 6), (2, 64, 2, 3)],
        [(8, 32), (16, 64), (32, 128), (32, 128), (64, 256)],
    ),
    RePaVisionTransformer=(
        'mmpretrain.VisionTransformer',
        dict(arch=VIT, img_size=64, pre_norm=True, out_type='featmap', out_indices=[0, 2]),
        (2, 3, 48, 80),
        [(2, 32, 3, 5)] * 2,
        [(32, 96)] * 3,
    ),
    RePaLVViT=(
        'LVViT',
        dict(arch=VIT, img_size=64, stem_channels=8, out_type='featmap', out_indices=[0, 2]),
        (2, 3, 41, 80),
        [(2, 32, 3, 5)] * 2,
        [(32, 96)] * 3,
    ),
    RePaPoolFormer=(
        'mmpretrain.PoolFormer',
        dict(arch=POOL, pool_size=7, out_indices=(0, 2, 4, 6)),
        (2, 3, 64, 96),
        [(2, 8, 16, 24), (2, 16, 8, 12), (2, 24, 4, 6), (2, 32, 2, 3)],
        [(8, 32), (16, 64), (24, 96), (24, 96), (32, 128)],
    ),
    RePaMlpMixer=(
        'mmpretrain.MlpMixer',
        dict(
            arch=dict(embed_dims=32, num_layers=3, tokens_mlp_dims=24, channels_mlp_dims=96),
            img_size=64,
            patch_size=16,
        ),
        (2, 3, 64, 64),
        [(2, 32, 16)],
        [(32, 96)] * 3,
    ),
)

OPTIONS = [
    dict(),
    dict(idle_ratio=0.0),
    dict(idle_ratio=1.0),
    dict(idle_schedule='linear'),
    dict(ffn_norm_cfg=dict(type='LN')),
]


def build(name, **kwargs):
    return MODELS.build(dict(type=name, **copy.deepcopy(FAMILY[name][1]), **kwargs))


def ffns_of(model, kind=ChannelIdleFFN):
    return [m for m in model.modules() if isinstance(m, kind)]


@pytest.mark.parametrize('name', FAMILY)
def test_features(name):
    _, _, shape, features, widths = FAMILY[name]
    model = build(name, drop_path_rate=0.1)
    assert [(f.embed_dims, f.feedforward_channels) for f in ffns_of(model)] == widths
    for mode in (model.train, model.eval):
        assert mode() is model
        out = model(torch.randn(shape))
        assert isinstance(out, tuple)
        assert [tuple(x.shape) for x in out] == features


@pytest.mark.parametrize('path', ['literal', 'folded'])
@pytest.mark.parametrize('name', FAMILY)
def test_every_parameter_gets_a_finite_gradient(name, path):
    model = set_training_path(build(name), path).train()
    x = torch.randn(FAMILY[name][2], requires_grad=True)
    sum(f.square().mean() for f in model(x)).backward()
    assert x.grad.abs().sum() > 0
    for key, param in model.named_parameters():
        assert param.grad is not None, key
        assert param.grad.isfinite().all(), key


@pytest.mark.parametrize('kwargs', OPTIONS)
@pytest.mark.parametrize('name', FAMILY)
def test_merge_is_exact(name, kwargs, randomize, relative_error):
    model = randomize(build(name, drop_path_rate=0.2, **kwargs)).eval()
    x = torch.randn(FAMILY[name][2])
    with torch.no_grad():
        expected = model(x)
        deployed = repa_mm.reparameterize(model)
        actual = deployed(x)
        for a, b in zip(actual, expected):
            assert relative_error(a, b) < 1e-5
        # And the deploy form that is built as such takes its weights.
        built = build(name, deploy=True, **kwargs)
        built.init_weights()
        built.load_state_dict(deployed.state_dict())
        for a, b in zip(built(x), actual):
            assert torch.equal(a, b)
    assert len(ffns_of(built, MergedFFN)) == len(FAMILY[name][4])


@pytest.mark.parametrize('idle_ratio', [0.25, 0.75])
@pytest.mark.parametrize('name', FAMILY)
def test_number_of_parameters(name, idle_ratio):
    vanilla, kwargs, _, _, widths = FAMILY[name]
    total = count_parameters(MODELS.build(dict(type=vanilla, **copy.deepcopy(kwargs))))
    # BatchNorm takes LayerNorm's place, and the second norm is new.
    training = total + sum(2 * h for _, h in widths)
    deploy = total
    scaled = isinstance(ffns_of(build(name))[0].layer_scale, torch.nn.Parameter)
    for c, h in widths:
        active = round(h * (1 - idle_ratio))
        deploy -= 2 * c + (c + 1) * h + (h + 1) * c + c * scaled
        deploy += (c + 1) * (active + c) + active * c
    assert count_parameters(build(name, idle_ratio=idle_ratio)) == training
    assert count_parameters(build(name, idle_ratio=idle_ratio, deploy=True)) == deploy < total


@pytest.mark.parametrize('package', ['mmpretrain', 'mmdet', 'mmseg'])
@pytest.mark.parametrize('name', FAMILY)
def test_builds_from_every_registry(name, package):
    registry = pytest.importorskip(f'{package}.registry').MODELS
    kwargs = copy.deepcopy(FAMILY[name][1])
    assert type(registry.build(dict(type=name, **kwargs))).__name__ == name


@pytest.mark.parametrize('name', FAMILY)
def test_initialization_and_pretrained_weights(name, tmp_path, randomize):
    model = build(name)
    model.init_weights()
    deployed = repa_mm.reparameterize(randomize(model))
    for source, deploy in ((model, False), (deployed, True)):
        path = str(tmp_path / f'{deploy}.pth')
        torch.save({f'backbone.{k}': v for k, v in source.state_dict().items()}, path)
        loaded = build(
            name,
            deploy=deploy,
            init_cfg=dict(type='Pretrained', checkpoint=path, prefix='backbone.'),
        )
        loaded.init_weights()
        for key, value in source.state_dict().items():
            assert torch.equal(loaded.state_dict()[key], value), key


@pytest.mark.parametrize('name', FAMILY)
def test_foreign_checkpoints_are_refused(name):
    vanilla, kwargs = FAMILY[name][:2]
    training = build(name)
    deployed = repa_mm.reparameterize(training)
    vanilla = MODELS.build(dict(type=vanilla, **copy.deepcopy(kwargs)))
    for model, source, message in [
        (training, deployed, 'in its training form'),
        (deployed, training, 'in its deploy form'),
        (training, vanilla, 'init_cfg'),
        (deployed, vanilla, 'in its deploy form'),
    ]:
        with pytest.raises(CheckpointError, match=message):
            load_state_dict(model, source.state_dict(), strict=False)


@pytest.mark.parametrize(
    'name, frozen',
    [
        ('RePaSwinTransformer', 1),
        ('RePaVisionTransformer', 1),
        ('RePaLVViT', 1),
        ('RePaPoolFormer', 1),
    ],
)
def test_frozen_stages_keep_their_statistics(name, frozen):
    model = build(name, frozen_stages=frozen).train()
    first, *_, last = ffns_of(model)
    assert not any(p.requires_grad for p in first.parameters())
    assert all(p.requires_grad for p in last.parameters())
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    before = [m.running_var.clone() for m in norms]
    model(torch.randn(FAMILY[name][2]))
    changed = {id(m) for m, b in zip(norms, before) if not torch.equal(m.running_var, b)}
    assert id(first.norm1) not in changed and id(first.norm2) not in changed
    assert id(last.norm1) in changed and id(last.norm2) in changed
    if name == 'RePaLVViT':
        assert not changed & {id(m) for m in model.patch_embed.modules()}


def test_poolformer_trains_its_patch_embedding():
    """Its parent freezes it by default."""
    assert build('RePaPoolFormer').patch_embed.proj.weight.requires_grad
    frozen = build('RePaPoolFormer', frozen_stages=0)
    assert not frozen.patch_embed.proj.weight.requires_grad


def test_poolformer_runs_on_views_of_channels_last_maps():
    model = build('RePaPoolFormer').eval()
    seen = []
    for ffn in ffns_of(model):
        ffn.register_forward_pre_hook(lambda m, args: seen.append(args[0].is_contiguous()))
    with torch.no_grad():
        model(torch.randn(2, 3, 64, 96).contiguous(memory_format=torch.channels_last))
    assert all(seen)


def test_norm_over_tokens_in_the_mixer():
    model = build('RePaMlpMixer', token_norm=True)
    layer = model.layers[0]
    x = torch.randn(2, 16, 32)
    expected = torch.nn.functional.layer_norm(
        x.transpose(1, 2), (16,), layer.norm1.weight, layer.norm1.bias
    )
    assert torch.allclose(layer.norm1(x).transpose(1, 2), expected)
    assert build('RePaMlpMixer').layers[0].norm1.normalized_shape == (32,)
