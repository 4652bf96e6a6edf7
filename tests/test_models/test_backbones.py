"""One table of backbones with structures, through the same tests."""

import copy

import pytest
import torch
import torch.nn as nn
from mmengine.config import ConfigDict
from mmengine.registry import MODELS
from mmengine.runner.checkpoint import load_state_dict
from torch.nn.modules.batchnorm import _BatchNorm

from repa_mm.io.checkpoints import load_weights
from repa_mm.models import RePaPoolFormer
from repa_mm.reparam import (
    ChannelIdleFFN,
    CheckpointError,
    Form,
    TrainingForm,
    finish_schedules_,
    reparameterize,
)

IDLE = dict(type='Restructured', structures=[dict(type='ChannelIdle')])
VIT = dict(
    arch=dict(embed_dims=32, num_layers=2, num_heads=4, feedforward_channels=96),
    img_size=32,
    patch_size=8,
    out_type='featmap',
)
SWIN = dict(
    arch=dict(embed_dims=8, depths=[1, 1, 2, 1], num_heads=[1, 2, 2, 4]),
    window_size=4,
    out_indices=(0, 1, 2, 3),
    pad_small_map=True,
)
POOL = dict(
    arch=dict(
        layers=[1, 1, 2, 1],
        embed_dims=[8, 16, 24, 32],
        mlp_ratios=[4] * 4,
        layer_scale_init_value=0.1,
    ),
    out_indices=(0, 2, 4, 6),
)
MIXER = dict(
    arch=dict(embed_dims=32, num_layers=2, tokens_mlp_dims=24, channels_mlp_dims=96),
    img_size=32,
    patch_size=8,
)
OTHER_SWIN = dict(embed_dims=8, depths=(1, 1, 2, 1), num_heads=(1, 1, 2, 2), window_size=4)

# The config, the ordinary backbone of the same shape ('' where only a structure knows it), and
# whether ordinary weights make a backbone that computes what the ordinary one does.
BACKBONES = dict(
    swin=(dict(type='RePaSwinTransformer', **SWIN), 'mmpretrain.SwinTransformer', False),
    vit=(dict(type='RePaVisionTransformer', **VIT), 'mmpretrain.VisionTransformer', False),
    vit_keep=(
        dict(type='RePaVisionTransformer', idle_ratio=0.0, ffn_norm_cfg=dict(type='keep'), **VIT),
        'mmpretrain.VisionTransformer',
        True,
    ),
    poolformer=(dict(type='RePaPoolFormer', **POOL), 'mmpretrain.PoolFormer', False),
    mixer=(dict(type='RePaMlpMixer', **MIXER), 'mmpretrain.MlpMixer', False),
    mmdet=(dict(IDLE, model=dict(type='mmdet.SwinTransformer', **OTHER_SWIN)), '', False),
    mmseg=(dict(IDLE, model=dict(type='mmseg.SwinTransformer', **OTHER_SWIN)), '', False),
)
OWN = ('idle_ratio', 'ffn_norm_cfg')

every = pytest.mark.parametrize('name', BACKBONES)


def build(name, **kwargs):
    return MODELS.build(dict(copy.deepcopy(BACKBONES[name][0]), **kwargs))


def build_ordinary(name, kind, **kwargs):
    cfg = BACKBONES[name][0]
    cfg = {k: v for k, v in cfg.get('model', cfg).items() if k not in OWN}
    return MODELS.build(dict(copy.deepcopy(cfg), type=kind, **kwargs))


def images(name, odd=True):
    """Of another size than the backbone is made for, where other sizes are possible."""
    fixed = name == 'mixer' or not odd
    return torch.randn(2, 3, *((32, 32) if fixed else (72, 88)))


@pytest.fixture
def scattered(randomize):
    """A model as after training, whose schedules have ended, in eval mode."""

    def scatter(model):
        randomize(model)
        for key, p in model.named_parameters():
            if key.endswith(('eta', 'bias_table')) or '.affine.' in key or 'layer_scale' in key:
                nn.init.uniform_(p, -1, 1)
        model.eval()  # mmpretrain's returns None
        return finish_schedules_(model)

    return scatter


@pytest.fixture
def check_same(relative_error):
    def check(actual, expected, bound=1e-5):
        for a, e in zip(actual, expected, strict=True):
            assert relative_error(a, e) < bound

    return check


def pretrained(model, path):
    torch.save({f'backbone.{k}': v for k, v in model.state_dict().items()}, path)
    return ConfigDict(type='Pretrained', checkpoint=str(path), prefix='backbone.')


@every
def test_merge_is_exact(name, scattered, check_same):
    model = scattered(build(name))
    x = images(name)
    with torch.no_grad():
        expected = model(x)
        deployed = reparameterize(model)
        check_same(deployed(x), expected)
        # The deploy form that is built as such takes the weights.
        built = build(name, deploy=True)
        built.init_weights()
        built.load_state_dict(deployed.state_dict(), strict=True)
        check_same(built.eval()(x), expected)
        model.switch_to_deploy()
        check_same(model(x), expected)
    # Window attention has another path for gradients.
    check_same(deployed(x), expected)


def check_merges_into_the_ordinary_backbone(name, kind, scattered, check_same):
    """Name by name, as the forms of some projects do."""
    model = scattered(build(name))
    ordinary = build_ordinary(name, kind)
    ordinary.load_state_dict(reparameterize(model).state_dict(), strict=True)
    ordinary.eval()
    x = images(name)
    with torch.no_grad():
        check_same(ordinary(x), model(x))


@every
def test_trains(name):
    model = build(name)
    model.init_weights()
    for end in (False, True):
        if end:
            finish_schedules_(model)
        assert model.train() is model
        model.zero_grad()
        sum(y.square().mean() for y in model(images(name))).backward()
        for key, param in model.named_parameters():
            assert param.grad is not None and param.grad.isfinite().all(), key


@every
def test_the_wrong_form_is_refused_whoever_loads(name):
    training = finish_schedules_(build(name))
    deployed = reparameterize(training)
    for model, source in ((training, deployed), (deployed, training)):
        form = 'training' if model is training else 'deploy'
        for load in (load_state_dict, nn.Module.load_state_dict):
            with pytest.raises(CheckpointError, match=f'in its {form} form at'):
                load(model, source.state_dict(), strict=False)
        model.load_state_dict(model.state_dict(), strict=True)


@pytest.mark.parametrize('name', [name for name, row in BACKBONES.items() if row[1]])
def test_ordinary_weights_are_refused_and_fill(name, scattered, check_same, tmp_path):
    kind, is_same = BACKBONES[name][1:]
    ordinary = scattered(build_ordinary(name, kind))
    model = build(name)
    with pytest.raises(CheckpointError, match='in its training form at|has nothing there'):
        load_state_dict(model, ordinary.state_dict(), strict=False)
    model = build(name, init_cfg=pretrained(ordinary, tmp_path / 'ordinary.pth'))
    before = {key: value.data_ptr() for key, value in model.state_dict(keep_vars=True).items()}
    model.init_weights()
    for key, value in model.state_dict(keep_vars=True).items():  # optimizers have the parameters
        assert value.data_ptr() == before[key]
    model.eval()
    x = images(name)
    with torch.no_grad():
        if is_same:
            check_same(model(x), ordinary(x))
        # What is outside of the forms is the ordinary model's.
        inside = tuple(n for n, m in model.named_modules() if isinstance(m, Form))
        for key, value in ordinary.state_dict().items():
            if not key.startswith(inside) and key in model.state_dict():
                assert torch.equal(model.state_dict()[key], value), key


@every
def test_own_weights_in_both_forms(name, scattered, tmp_path):
    model = scattered(build(name))
    for source, deploy in ((model, False), (reparameterize(model), True)):
        init_cfg = pretrained(source, tmp_path / f'{deploy}.pth')
        loaded = build(name, deploy=deploy, init_cfg=init_cfg)
        loaded.init_weights()
        for key, value in source.state_dict().items():
            assert torch.equal(loaded.state_dict()[key], value), key
        if deploy:  # which is no start for training
            with pytest.raises(CheckpointError, match='needs deploy=True'):
                build(name, init_cfg=init_cfg).init_weights()


@pytest.mark.parametrize('deploy', [False, True])
@pytest.mark.parametrize('kind, other', [('keep', 'BN'), ('BN', 'keep')])
def test_the_refusal_of_other_norms_says_how_to_build_the_model(kind, other, deploy, tmp_path):
    def built(kind, **kwargs):
        return build('swin', ffn_norm_cfg=dict(type=kind), **kwargs)

    model = built(kind, deploy=deploy)
    init_cfg = pretrained(model, tmp_path / 'file.pth')
    weights, same = model.state_dict(), dict(deploy=deploy)
    for load in (
        lambda: load_state_dict(built(other, **same), weights, strict=False),
        lambda: load_weights(built(other), weights),  # which takes the form of the weights
        lambda: built(other, init_cfg=init_cfg, **same).init_weights(),
    ):
        with pytest.raises(CheckpointError, match=rf"with ffn_norm_cfg=dict\(type='{kind}'\)"):
            load()


@pytest.mark.parametrize('source', ['training', 'deploy', 'ordinary'])
def test_the_second_of_two_files_has_the_last_word(source, scattered, tmp_path):
    """As in MMEngine."""
    form, files = dict(deploy=source == 'deploy'), []
    model = build('vit', **form)
    if source == 'ordinary':
        model = model.build_ordinary()
    scattered(model)
    for i in range(2):
        files.append(pretrained(model, tmp_path / f'{i}.pth'))
        for p in model.parameters():
            p.data.mul_(2)
    models = [build('vit', init_cfg=given, **form) for given in (files, files[1], files[0])]
    for model in models:
        model.init_weights()
    both, last, first = (model.state_dict() for model in models)
    names = [name for name, value in first.items() if not torch.equal(value, last[name])]
    assert len(names) > 20
    assert all(torch.equal(both[name], last[name]) for name in names)


def test_weights_are_initialized_once_from_what_init_cfg_says_then(scattered, tmp_path):
    ordinary = scattered(build_ordinary('vit', 'mmpretrain.VisionTransformer'))
    model = build('vit')
    model.init_cfg = pretrained(ordinary, tmp_path / 'ordinary.pth')
    model.init_weights()
    weight = model.layers[0].ffn.fc1.weight
    assert torch.equal(weight, ordinary.layers[0].ffn.layers[0][0].weight)
    nn.init.zeros_(weight)
    model.init_weights()  # as a Runner does with a model that it is given
    assert not weight.any()


def test_own_weights_beside_other_ways_to_initialize(scattered, tmp_path):
    source = scattered(build('swin')).state_dict()
    del source['norm0.weight'], source['norm0.bias']  # of another output than the file's
    torch.save(source, tmp_path / 'own.pth')
    own = dict(type='Pretrained', checkpoint=str(tmp_path / 'own.pth'))
    others = dict(type='Constant', layer='LayerNorm', val=7.0, bias=7.0)
    model = build('swin', init_cfg=[own, others])
    model.init_weights()
    for name, value in model.state_dict().items():
        assert torch.equal(value, source.get(name, torch.full_like(value, 7))), name


CLASSIFIER = dict(
    type='mmpretrain.ImageClassifier',
    backbone=dict(type='mmpretrain.VisionTransformer', **dict(VIT, out_type='cls_token')),
    head=dict(type='mmpretrain.LinearClsHead', num_classes=3, in_channels=32),
)


@pytest.mark.parametrize('name', ['swin', 'vit', 'poolformer', 'whole'])
def test_frozen_stages_keep_their_statistics(name):
    if name == 'whole':  # a model whose backbone freezes stages
        backbone = dict(CLASSIFIER['backbone'], frozen_stages=1)
        model = MODELS.build(dict(IDLE, model=dict(CLASSIFIER, backbone=backbone))).train()
    else:
        model = build(name, frozen_stages=1).train()
    first, *_, last = [m for m in model.modules() if isinstance(m, ChannelIdleFFN)]
    assert not any(p.requires_grad for p in first.parameters())
    assert all(p.requires_grad for p in last.parameters())
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    before = [m.running_var.clone() for m in norms]
    model(images(name, odd=name != 'whole'))
    changed = {id(m) for m, b in zip(norms, before) if not torch.equal(m.running_var, b)}
    assert not {id(first.norm1), id(first.norm2)} & changed
    assert {id(last.norm1), id(last.norm2)} <= changed


@pytest.mark.parametrize('name', ['swin', 'vit', 'poolformer', 'mixer', 'mmdet'])
def test_statistics_that_stay(name):
    for norm_eval in (False, True):
        model = build(name, norm_eval=norm_eval).train()
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
        assert model.training and norms and all(m.training != norm_eval for m in norms)
    model.trained = nn.BatchNorm1d(2)  # as of a head
    model.trained.num_batches_tracked += 1
    with pytest.warns(UserWarning, match='never estimated'):  # fresh ones would be frozen
        model.init_weights()


def test_the_builder_s_norm_eval_precedes_the_backbone_s():
    swin = dict(type='mmpretrain.SwinTransformer', norm_eval=False, **SWIN)
    assert MODELS.build(dict(IDLE, model=swin, norm_eval=True)).norm_eval


def test_whole_models_take_structures(scattered, check_same):
    """A builder for any model; MMEngine's Runner passes it the preprocessor beside a model."""
    preprocessor = dict(mean=[1.0] * 3, std=[2.0] * 3)
    model = MODELS.build(dict(IDLE, model=CLASSIFIER, data_preprocessor=preprocessor))
    assert model.data_preprocessor.mean.flatten().tolist() == [1.0] * 3
    assert isinstance(model, MODELS.get('mmpretrain.ImageClassifier'))
    scattered(model)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        deployed = reparameterize(model)
        assert not any(isinstance(m, TrainingForm) for m in deployed.modules())
        check_same(*([m.head(m.extract_feat(x))] for m in (deployed, model)))


def test_what_cannot_be_built_is_named():
    for cfg, message in (
        (dict(IDLE, model=dict(type='Swim')), "'Swim' is no class"),
        (dict(IDLE, model=BACKBONES['vit'][0]), 'has structures already'),
        (dict(IDLE, model=dict(type='mmdet.ResNet', depth=18)), 'no site'),
        (
            dict(IDLE, model=CLASSIFIER, structures=[dict(type='Channels')]),
            "unknown structure 'Channels'; known are .*ChannelIdle",
        ),
        (dict(BACKBONES['vit'][0], idle_ratio=[0.5]), '1 entries, but the model has 2 blocks'),
        (dict(BACKBONES['vit'][0], idle_ratio=1.5), 'idle_ratio must be a number'),
    ):
        with pytest.raises(ValueError, match=message):
            MODELS.build(copy.deepcopy(cfg))


def test_poolformer_trains_its_patch_embedding_and_sees_views():
    """Its parent freezes it by default; tokens are views of channels-last maps."""
    model = build('poolformer').eval()
    assert isinstance(model, RePaPoolFormer) and model.patch_embed.proj.weight.requires_grad
    assert not build('poolformer', frozen_stages=0).patch_embed.proj.weight.requires_grad
    seen = []
    for ffn in (m for m in model.modules() if isinstance(m, ChannelIdleFFN)):
        ffn.register_forward_pre_hook(lambda m, args: seen.append(args[0].is_contiguous()))
    with torch.no_grad():
        model(torch.randn(2, 3, 64, 96).contiguous(memory_format=torch.channels_last))
        maps = reparameterize(build('poolformer'))(torch.randn(1, 3, 64, 96))
    assert seen and all(seen)
    assert all(x.is_contiguous() for x in maps)  # RoIAlign reads them as such


def test_activation_checkpointing_gives_the_same_gradients(check_same):
    model = build('swin', with_cp=True, drop_path_rate=0.0).double().train()
    other = build('swin', drop_path_rate=0.0).double().train()
    other.load_state_dict(model.state_dict())
    x = torch.randn(1, 3, 64, 64, dtype=torch.double, requires_grad=True)
    grads = []
    for each in (model, other):
        sum(out.square().sum() for out in each(x)).backward()
        grads.append([p.grad for p in each.parameters()])
    check_same(*grads, bound=1e-9)


def test_a_dense_swin_takes_every_size_that_mmdetections_takes(randomize):
    cfg = {key: value for key, value in SWIN.items() if key != 'pad_small_map'}
    dense, asked = (MODELS.build(dict(type='RePaSwinTransformer', **a)) for a in (cfg, SWIN))
    asked.load_state_dict(randomize(dense).eval().state_dict())
    for size in (40, 24), (128, 128):  # the last maps are smaller than a window, and one window
        maps = zip(dense(x := torch.rand(1, 3, *size)), asked.eval()(x))
        assert all(torch.equal(*both) for both in maps)
    alone = MODELS.build(dict(type='RePaSwinTransformer', **dict(cfg, out_indices=(3,))))
    with pytest.raises(AssertionError, match='pad_small_map=True'):
        alone(torch.rand(1, 3, 40, 24))
