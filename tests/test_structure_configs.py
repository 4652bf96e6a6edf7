"""The configs of other structures: they load, build, train a step and merge."""

from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS

from repa_mm import config_path, reparameterize
from repa_mm.engine.complexity import count_parameters
from repa_mm.paths import config_root
from repa_mm.reparam import Scheduled, TrainingForm, finish_schedules

from .test_configs import batch_of, build, check_weight_decay, load_config

NAMES = sorted(f'structures/{p.stem}' for p in (Path(config_root()) / 'structures').glob('*.py'))
PRETRAINING = [name for name in NAMES if name.endswith('_mae')]
VANILLA = ['structures/vit_t_in1k']
TRAINING = [name for name in NAMES if name not in PRETRAINING + VANILLA]


def test_there_is_every_model():
    names = {name.rpartition('/')[2] for name in NAMES}
    assert names >= {f'parallel_vit_t_{n}_{k}' for n in (6, 4, 3) for k in ('mae', 'in1k')}
    tasks = ('retinanet', 'mask_rcnn', 'upernet')
    assert names >= {f'{task}_parallel_{k}swin_s' for task in tasks for k in ('', 'repa_')}
    assert names >= {'parallel_swin_s_in1k', 'parallel_repa_swin_s_in1k'}
    for size in 'ts':
        assert names >= {f'progressive_{k}swin_{size}_in1k' for k in ('', 'repa_')}
        assert names >= {
            f'{task}_progressive_{k}swin_{size}' for task in tasks[:2] for k in ('', 'repa_')
        }
    assert names >= {
        f'{m}_{k}deit_t_in1k' for m in ('progressive', 'experts') for k in ('', 'repa_')
    }
    assert 'riformer_s12_in1k' in names


@pytest.mark.parametrize('name', NAMES)
def test_config_is_complete(name):
    cfg = Config.fromfile(config_path(name))
    assert cfg.custom_imports['imports'] == ['repa_mm']
    hooks = [hook['type'] for hook in cfg.get('custom_hooks', [])]
    assert hooks[-1:] == ([] if name in PRETRAINING + VANILLA else ['ReparameterizeHook'])
    init_cfg = cfg.model.backbone.get('init_cfg')
    if init_cfg:
        assert init_cfg.type == 'Pretrained' and init_cfg.prefix == 'backbone.'
        assert init_cfg.checkpoint.startswith('checkpoints/')


def _large(name):
    return 'progressive' in name and 'swin_s' in name


@pytest.mark.parametrize(
    'name', [pytest.param(n, marks=pytest.mark.slow if _large(n) else ()) for n in TRAINING]
)
def test_model_trains_a_step_and_merges(name, relative_error):
    cfg = load_config(name)
    if 'upernet' in name:
        cfg.model.data_preprocessor.size = (64, 64)
    if 'mask_rcnn' in name:
        cfg.model.train_cfg.rpn_proposal.max_per_img = 20
        cfg.model.train_cfg.rcnn.sampler.num = 16
    model = build(cfg)
    model.train()
    optim_wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    assert sum(len(group['params']) for group in optim_wrapper.optimizer.param_groups) == sum(
        1 for _ in model.parameters()
    )
    if not any(kind in name for kind in ('vit', 'riformer')):
        weight_decay = cfg.optim_wrapper.optimizer.weight_decay
        check_weight_decay(model, optim_wrapper.optimizer, weight_decay, biases='in1k' in name)
    size = 224 if 'in1k' in name else 64
    data = model.data_preprocessor(batch_of(cfg, size), training=True)
    loss, _ = model.parse_losses(model(**data, mode='loss'))
    assert torch.isfinite(loss)
    optim_wrapper.backward(loss)
    without = [n for n, p in model.named_parameters() if p.grad is None]
    assert not without, 'distributed training needs a gradient everywhere'
    optim_wrapper.step()

    # Every schedule has a hook that ends it.
    scheduled = any(isinstance(m, Scheduled) for m in model.modules())
    hooks = [hook['type'] for hook in cfg.custom_hooks]
    assert hooks.count('ScheduleHook') == scheduled
    model.eval()
    # In float64: after one step BatchNorms do not normalize, and rounding errors grow with depth.
    backbone = finish_schedules(model).backbone.double()
    x = torch.randn(1, 3, size, size, dtype=torch.double)
    with torch.no_grad():
        expected, merged = backbone(x), reparameterize(backbone)
        found = merged(x)
    for a, e in zip(found, expected):
        assert relative_error(a, e) < 1e-10
    assert not any(isinstance(m, TrainingForm) for m in merged.modules())
    assert count_parameters(merged) < count_parameters(backbone)


@pytest.mark.parametrize('name', PRETRAINING)
def test_pretraining_leads_to_the_classifier(name, tmp_path):
    cfg = load_config(name)
    cfg.model.neck.update(decoder_depth=1, decoder_embed_dim=64)
    model = MODELS.build(cfg.model)
    model.init_weights()
    model.train()
    optim_wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    images = torch.randint(256, (2, 3, 224, 224), dtype=torch.uint8)
    data = model.data_preprocessor(dict(inputs=images, data_samples=[None] * 2), training=True)
    losses = model(data['inputs'], None, mode='loss')
    optim_wrapper.backward(losses['loss'])
    without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without
    optim_wrapper.step()
    own = dict(model.named_parameters())
    assert not [n for n, value in before.items() if torch.equal(value, own[n])]
    path = str(tmp_path / 'mae.pth')
    torch.save(dict(state_dict=model.state_dict()), path)
    cfg = load_config(name.replace('_mae', '_in1k'))
    assert cfg.pretrained.endswith(f'{name.rpartition("/")[2]}.pth')
    cfg.model.backbone.init_cfg.checkpoint = path
    classifier = MODELS.build(cfg.model)
    classifier.init_weights()
    loaded = classifier.backbone.state_dict()
    # Mean features have a norm of their own.
    for key in set(loaded) - {'ln2.weight', 'ln2.bias'}:
        assert torch.equal(loaded[key], model.backbone.state_dict()[key]), key
