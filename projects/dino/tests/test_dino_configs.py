"""The configs of DINO, of its linear evaluation, and of what starts from its teacher."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.model.utils import revert_sync_batchnorm
from mmengine.optim import build_optim_wrapper
from mmengine.registry import HOOKS, MODELS, PARAM_SCHEDULERS, TRANSFORMS
from torch.nn.modules.batchnorm import _BatchNorm

from repa_mm import reparameterize
from tests import test_configs
from tests.test_configs import batch_of

pytest.importorskip('lightly')
CONFIGS = Path(__file__).parents[1] / 'configs'
PRETRAINING = ['repa_vit_s_dino', 'vit_s_dino', 'repa_vit_b_dino', 'vit_b_dino']
ARCH = dict(embed_dims=24, num_layers=12, num_heads=2, feedforward_channels=48)


def load(name):
    return test_configs.load(str(CONFIGS / f'{name}.py'))


@pytest.mark.parametrize('name', [PRETRAINING[0], 'repa_vit_photos_dino'])
def test_model_trains_a_step_on_its_crops(name, tmp_path):
    cfg = load(name)
    path = str(tmp_path / 'image.png')
    cv2.imwrite(path, np.random.default_rng(0).integers(0, 256, (90, 120, 3), np.uint8))
    results = dict(img_path=path)
    for step in cfg.train_dataloader.dataset.pipeline:
        results = TRANSFORMS.build(step)(results)
    sizes = [crop.shape[1] for crop in results['inputs']]
    assert sizes == ([64] * 2 + [32] * 4 if 'photos' in name else [224] * 2 + [96] * 8)

    cfg.model.neck.out_channels = cfg.model.head.out_channels = 64
    model = MODELS.build(cfg.model)
    model.init_weights()
    model.head.epoch = 0  # what DINOHook sets
    optim_wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    for group in optim_wrapper.optimizer.param_groups:
        for parameter in group['params']:
            assert not parameter.requires_grad or bool(group['weight_decay']) == (
                parameter.dim() > 1
            )
    crops = results['inputs'][:2] + results['inputs'][-1:]
    data = dict(inputs=[torch.stack([crop, crop]) for crop in crops], data_samples=[])
    loss, _ = model.parse_losses(model(**model.data_preprocessor(data, training=True), mode='loss'))
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
    cfg, length = load(name), 3
    settings = cfg.optim_wrapper.optimizer
    groups = [dict(params=[torch.nn.Parameter(torch.zeros(2, 2))])]
    groups.append(dict(params=[torch.nn.Parameter(torch.zeros(2))], weight_decay=0.0))
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
            scheduler.step()
    # 5e-4 for 256 images; 8 x 64 are the base of --auto-scale-lr.
    assert cfg.auto_scale_lr.base_batch_size == 8 * cfg.train_dataloader.batch_size == 512
    expected = literal_schedule(5e-4 * 512 / 256, 1e-6, 300, length, warmup=10)
    np.testing.assert_allclose(rates, expected, rtol=1e-6, atol=2e-9)
    np.testing.assert_allclose(decays, literal_schedule(0.04, 0.4, 300, length), rtol=1e-6)
    hook = HOOKS.build(cfg.custom_hooks[0])
    momenta = [hook.momentum_at(i, 300 * length) for i in range(300 * length)]
    np.testing.assert_allclose(momenta, literal_schedule(0.996, 1, 300, length), rtol=1e-12)
    assert (hook.clip, hook.freeze_last_layer) == (3.0, 1)
    assert cfg.model.backbone.get('idle_ratio') == (0.75 if 'repa' in name else None)


@pytest.mark.parametrize('name', ['repa_vit_s', pytest.param('vit_b', marks=pytest.mark.slow)])
def test_linear_evaluation_trains_the_classifier_alone(name, randomize):
    cfg = load(f'{name}_dino_linear')
    init_cfg = cfg.model.backbone.pop('init_cfg')
    assert init_cfg.checkpoint == f'work_dirs/{name}_dino/epoch_300.pth'
    assert init_cfg.prefix == 'teacher.backbone.'
    model = randomize(MODELS.build(cfg.model)).train()
    statistics = [m.running_mean.clone() for m in model.modules() if isinstance(m, _BatchNorm)]
    data = model.data_preprocessor(batch_of(cfg, 64), training=True)
    model.parse_losses(model(**data, mode='loss'))[0].backward()
    learnt = {n for n, p in model.named_parameters() if p.grad is not None}
    assert learnt == {'head.fc.weight', 'head.fc.bias'}
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    assert all(torch.equal(m.running_mean, before) for m, before in zip(norms, statistics))


@pytest.mark.parametrize('task', ['segmentor', 'detector'])
def test_dense_models_start_from_the_teacher(task, tmp_path, randomize, relative_error):
    cfg = load('repa_vit_s_dino')
    cfg.model.backbone.update(arch=ARCH, img_size=48)
    cfg.model.neck.update(in_channels=24, hidden_channels=8, out_channels=8)
    cfg.model.head.out_channels = 8
    dino = randomize(MODELS.build(cfg.model))
    torch.save(dict(state_dict=dino.state_dict()), tmp_path / 'dino.pth')

    if task == 'segmentor':
        cfg = load('upernet_repa_vit_s_dino')
        cfg.model.data_preprocessor.size = (64, 64)
        cfg.model.neck.embed_dim = cfg.model.auxiliary_head.in_channels = 24
        cfg.model.decode_head.update(in_channels=[24] * 4, channels=16)
        cfg.model.auxiliary_head.channels = 16
    else:
        cfg = load('retinanet_repa_vit_s_dino')
        cfg.model.neck[0].embed_dim = 24
        cfg.model.neck[1].in_channels = [24] * 4
    cfg.model.backbone.update(arch=ARCH, img_size=64)
    cfg.model.backbone.init_cfg.checkpoint = str(tmp_path / 'dino.pth')
    model = revert_sync_batchnorm(MODELS.build(cfg.model))
    model.init_weights()
    teacher = dino.teacher.backbone.state_dict()
    for name, value in model.backbone.state_dict().items():
        # 4x4 patches in place of 3x3
        assert name == 'pos_embed' or torch.equal(value, teacher[name]), name
    data = model.data_preprocessor(batch_of(cfg, 64), training=True)
    model.train().parse_losses(model(**data, mode='loss'))[0].backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None]
    model.eval()
    x = torch.randn(1, 3, 96, 64)
    with torch.no_grad():
        for a, b in zip(reparameterize(model).extract_feat(x), model.extract_feat(x)):
            assert relative_error(a, b) < 1e-4
