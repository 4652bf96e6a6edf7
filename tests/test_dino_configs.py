"""The configs of DINO and of its linear evaluation: they load, build, and train a step."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.model.utils import revert_sync_batchnorm
from mmengine.optim import build_optim_wrapper
from mmengine.registry import HOOKS, MODELS, PARAM_SCHEDULERS, TRANSFORMS, init_default_scope
from torch.nn.modules.batchnorm import _BatchNorm

from repa_mm import config_path, reparameterize
from repa_mm.run import load_config

from .test_configs import batch_of

pytest.importorskip('mmpretrain')
PRETRAINING = ['repa_vit_s_dino', 'vit_s_dino', 'repa_vit_b_dino', 'vit_b_dino']
DEMO = ['demo/dino_repa_vit_photos', 'demo/dino_vit_photos']
SMALL = dict(embed_dims=24, num_layers=12, num_heads=2, feedforward_channels=48)


def load(name):
    cfg = load_config(config_path(f'{name}.py'))
    init_default_scope(cfg.default_scope)
    return cfg


@pytest.mark.parametrize('name', PRETRAINING + DEMO)
def test_crops(name, tmp_path):
    cfg = load(name)
    path = str(tmp_path / 'image.png')
    cv2.imwrite(path, np.random.default_rng(0).integers(0, 256, (90, 120, 3), np.uint8))
    results = dict(img_path=path)
    for step in cfg.train_dataloader.dataset.pipeline:
        results = TRANSFORMS.build(step)(results)
    sizes = [crop.shape[1] for crop in results['inputs']]
    assert sizes == ([64] * 2 + [32] * 4 if 'demo' in name else [224] * 2 + [96] * 8)


@pytest.mark.parametrize('name', [PRETRAINING[0], *DEMO])
def test_model_trains_a_step(name):
    pytest.importorskip('lightly')
    cfg = load(name)
    cfg.model.neck.out_channels = cfg.model.head.out_channels = 64
    model = MODELS.build(cfg.model)
    model.init_weights()
    model.head.epoch = 0  # what DINOHook sets
    optim_wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    decays = {}
    names = {parameter: key for key, parameter in model.named_parameters()}
    for group in optim_wrapper.optimizer.param_groups:
        for parameter in group['params']:
            decays[names[parameter]] = group['weight_decay']
    assert {
        key for key, decay in decays.items() if not decay and model.get_parameter(key).requires_grad
    } == {key for key, p in model.named_parameters() if p.dim() == 1 and p.requires_grad}
    size = 32 if 'demo' in name else 64
    crops = [torch.randint(256, (2, 3, s, s)) for s in (2 * size, 2 * size, size)]
    data = model.data_preprocessor(dict(inputs=crops, data_samples=[]), training=True)
    loss, _ = model.parse_losses(model(**data, mode='loss'))
    optim_wrapper.backward(loss)
    without = [n for n, p in model.named_parameters() if p.grad is None and p.requires_grad]
    assert not without, 'distributed training needs a gradient everywhere'


def literal_schedule(base, final, epochs, epoch_length, warmup=0):
    """The schedules of DINO's authors: linear from 0 to the base, then a cosine to the end."""
    rise = np.linspace(0, base, warmup * epoch_length)
    rest = np.arange((epochs - warmup) * epoch_length)
    cosine = final + 0.5 * (base - final) * (1 + np.cos(np.pi * rest / len(rest)))
    return np.concatenate([rise, cosine])


@pytest.mark.parametrize('name', PRETRAINING)
def test_schedules_are_those_of_the_authors(name):
    pytest.importorskip('lightly')
    cfg, length = load(name), 3
    weights = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))
    settings = cfg.optim_wrapper.optimizer
    groups = [dict(params=[weights[0]]), dict(params=[weights[1]], weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, weight_decay=settings.weight_decay)
    common = dict(optimizer=optimizer, epoch_length=length)
    schedulers = [PARAM_SCHEDULERS.build(s, default_args=common) for s in cfg.param_scheduler]
    rates, decays = [], []
    for _ in range(cfg.train_cfg.max_epochs * length):
        rates.append(optimizer.param_groups[0]['lr'])
        decays.append(optimizer.param_groups[0]['weight_decay'])
        assert optimizer.param_groups[1]['weight_decay'] == 0
        optimizer.step()
        for scheduler in schedulers:
            assert not scheduler.by_epoch
            scheduler.step()
    # 5e-4 for 256 images; 8 x 64 are the base of --auto-scale-lr.
    assert cfg.auto_scale_lr.base_batch_size == 8 * cfg.train_dataloader.batch_size == 512
    expected = literal_schedule(5e-4 * 512 / 256, 1e-6, 300, length, warmup=10)
    np.testing.assert_allclose(rates, expected, rtol=1e-6, atol=2e-9)
    np.testing.assert_allclose(decays, literal_schedule(0.04, 0.4, 300, length), rtol=1e-6)
    (hook,) = cfg.custom_hooks
    hook = HOOKS.build(hook)
    momenta = [hook.momentum_at(i, 300 * length) for i in range(300 * length)]
    np.testing.assert_allclose(momenta, literal_schedule(0.996, 1, 300, length), rtol=1e-12)
    assert (hook.clip, hook.freeze_last_layer) == (3.0, 1)
    temperatures = MODELS.build(cfg.model.head).loss_module.teacher_temp_schedule
    np.testing.assert_allclose(temperatures, np.linspace(0.04, 0.07, 30), rtol=1e-6)
    assert cfg.train_dataloader.drop_last and cfg.model.backbone.drop_path_rate == 0.1
    assert not cfg.model.neck.norm_last_layer


def test_size_and_ratio():
    small, base = load('repa_vit_s_dino'), load('repa_vit_b_dino')
    assert small.model.backbone.type == 'RePaVisionTransformer'
    assert small.model.backbone.idle_ratio == base.model.backbone.idle_ratio == 0.75
    assert (small.model.neck.in_channels, base.model.neck.in_channels) == (384, 768)
    assert base.model.backbone.arch == load('vit_b_dino').model.backbone.arch == 'deit-base'
    assert load('vit_s_dino').model.backbone.type == 'VisionTransformer'


@pytest.mark.parametrize(
    'name',
    [
        'repa_vit_s',
        pytest.param('vit_s', marks=pytest.mark.slow),
        'repa_vit_b',
        pytest.param('vit_b', marks=pytest.mark.slow),
    ],
)
def test_linear_evaluation_trains_the_classifier_alone(name, relative_error, randomize):
    cfg = load(f'{name}_dino_linear')
    init_cfg = cfg.model.backbone.pop('init_cfg')
    assert init_cfg.checkpoint == f'work_dirs/{name}_dino/epoch_300.pth'
    assert init_cfg.prefix == 'teacher.backbone.'
    model = randomize(MODELS.build(cfg.model)).train()
    statistics = [m.running_mean.clone() for m in model.modules() if isinstance(m, _BatchNorm)]
    data = model.data_preprocessor(batch_of(cfg, 64), training=True)
    loss, _ = model.parse_losses(model(**data, mode='loss'))
    loss.backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == {
        'head.fc.weight',
        'head.fc.bias',
    }
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    assert all(torch.equal(m.running_mean, before) for m, before in zip(norms, statistics))
    if name.startswith('repa'):
        model.eval()
        with torch.no_grad():
            x = torch.randn(1, 3, 64, 64)
            assert relative_error(reparameterize(model)(x), model(x)) < 1e-5


@pytest.fixture
def pretrained(tmp_path, randomize):
    """A checkpoint of DINO with a small backbone for images of 48x48."""
    pytest.importorskip('lightly')
    cfg = load('repa_vit_s_dino')
    cfg.model.backbone.update(arch=SMALL, img_size=48)
    cfg.model.neck.update(in_channels=24, hidden_channels=8, out_channels=8)
    cfg.model.head.out_channels = 8
    model = randomize(MODELS.build(cfg.model))
    path = str(tmp_path / 'dino.pth')
    torch.save(dict(state_dict=model.state_dict()), path)
    return path, model.teacher.backbone.state_dict()


def test_segmentor_starts_from_the_teacher(pretrained):
    pytest.importorskip('mmseg')
    linear = load('repa_vit_s_dino_linear')
    cfg = load('upernet_repa_vit_s_dino')
    start = cfg.model.backbone.init_cfg
    assert start == linear.model.backbone.init_cfg
    start.checkpoint, teacher = pretrained
    cfg.model.data_preprocessor.size = (64, 64)
    cfg.model.backbone.update(arch=SMALL, img_size=64)
    cfg.model.neck.embed_dim = cfg.model.auxiliary_head.in_channels = 24
    cfg.model.decode_head.update(in_channels=[24] * 4, channels=16)
    cfg.model.auxiliary_head.channels = 16
    model = revert_sync_batchnorm(MODELS.build(cfg.model))
    model.init_weights()
    for name, value in model.backbone.state_dict().items():
        if name == 'pos_embed':  # 4x4 patches in place of 3x3
            assert value.shape == (1, 17, 24)
            assert torch.equal(value[:, 0], teacher[name][:, 0])
        else:
            assert torch.equal(value, teacher[name]), name
    data = model.data_preprocessor(batch_of(cfg, 64), training=True)
    loss, _ = model.train().parse_losses(model(**data, mode='loss'))
    loss.backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None]


def test_detector_starts_from_the_teacher(pretrained, tmp_path, relative_error):
    """The config of docs/self_supervised.md, with its weights, and in both forms."""
    pytest.importorskip('mmdet')
    pytest.importorskip('mmseg')
    page = (Path(__file__).parents[1] / 'docs' / 'self_supervised.md').read_text()
    text = page.split('<!-- detector -->')[1].split('```python\n')[1].split('```')[0]
    base = 'retinanet_repa_swin_t.py'
    path = tmp_path / 'retinanet.py'
    path.write_text(text.replace(repr(base), repr(config_path(base))))
    cfg = load_config(str(path))
    cfg.model.backbone.init_cfg.checkpoint, teacher = pretrained
    cfg.model.backbone.update(arch=SMALL, img_size=64)
    cfg.model.neck[0].embed_dim = 24
    cfg.model.neck[1].in_channels = [24] * 4
    model = MODELS.build(cfg.model)
    model.init_weights()
    for name, value in model.backbone.state_dict().items():
        assert name == 'pos_embed' or torch.equal(value, teacher[name]), name
    data = model.data_preprocessor(batch_of(cfg, 64), training=True)
    loss, _ = model.train().parse_losses(model(**data, mode='loss'))
    loss.backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None]
    model.eval()
    x = torch.randn(1, 3, 96, 64)
    with torch.no_grad():
        maps = model.extract_feat(x)
        assert [tuple(m.shape[2:]) for m in maps] == [(12, 8), (6, 4), (3, 2), (1, 1), (1, 1)]
        for a, b in zip(reparameterize(model).extract_feat(x), maps):
            assert relative_error(a, b) < 1e-4
