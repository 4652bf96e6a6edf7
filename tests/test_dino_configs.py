"""The configs of DINO and of its linear evaluation: they load, build, and train a step."""

import cv2
import numpy as np
import pytest
import torch
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, TRANSFORMS, init_default_scope
from torch.nn.modules.batchnorm import _BatchNorm

from repa_mm import config_path, reparameterize
from repa_mm.runtime import load_config

from .test_configs import batch_of

pytest.importorskip('mmpretrain')
PRETRAINING = ['repa_vit_s_dino', 'vit_s_dino', 'repa_vit_b_dino', 'vit_b_dino']
DEMO = ['demo/dino_repa_vit_photos', 'demo/dino_vit_photos']


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
