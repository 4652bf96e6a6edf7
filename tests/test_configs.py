"""The configs: they build, train a step, merge, and say what papers and codebases say."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import cv2
import modelindex
import numpy as np
import pytest
import torch
from mmdet.testing import demo_mm_inputs
from mmengine.config import Config, ConfigDict
from mmengine.fileio import dump
from mmengine.fileio import load as load_file
from mmengine.model.utils import revert_sync_batchnorm
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DATASETS, METRICS, MODELS, PARAM_SCHEDULERS, init_default_scope
from mmengine.runner import Runner
from mmengine.structures import PixelData
from mmpretrain.structures import DataSample
from mmseg.structures import SegDataSample
from torch.nn.modules.batchnorm import _BatchNorm

from repa_mm import config_path, reparameterize
from repa_mm.apis.features import head_inputs, tensors
from repa_mm.reparam import TrainingForm, finish_schedules_
from tests.shared import check_norms_decay_alike

ROOT = Path(config_path('swin_t_in1k')).parent
NAMES = [
    path.relative_to(ROOT).with_suffix('').as_posix()
    for path in [*sorted(ROOT.glob('[!_]*/*.py')), *sorted(ROOT.glob('*.py'))]
]
DETRS = [name for name in NAMES if name.startswith('detr/')]
NAMES = [name for name in NAMES if name not in DETRS]

# RePaFormer table 7, and the released commands of the other models: learning rate, its minimum,
# weight decay, drop path.
TABLE_7 = dict(
    deit_t=(2.5e-3, 1e-6, 0.02, 0.02),
    deit_s=(3e-3, 4e-5, 0.05, 0.04),
    deit_b=(4e-3, 4e-5, 0.07, 0.10),
    vit_l=(1e-3, 5e-5, 0.05, 0.3),
    vit_h=(1e-3, 5e-5, 0.05, 0.3),
    swin_t=(5e-3, 5e-5, 0.20, 0.10),
    swin_s=(6e-3, 5e-5, 0.15, 0.09),
    swin_b=(4e-3, 2e-5, 0.10, 0.08),
    poolformer_s12=(2.5e-3, 6e-6, 0.16, 0.02),
    poolformer_s24=(3.5e-3, 1.5e-6, 0.08, 0.01),
    poolformer_s36=(5.5e-3, 3e-6, 0.01, 0.03),
    mlp_mixer_b16=(5e-3, 5e-6, 0.13, 0.04),
    mlp_mixer_l16=(4e-3, 1e-5, 0.16, 0.05),
)


def load(name):
    """A config, ready to build from; skips without its codebase."""
    cfg = Config.fromfile(config_path(name) if not str(name).startswith('/') else name)
    init_default_scope(cfg.default_scope)
    return cfg


def build(cfg):
    cfg.model.backbone.init_cfg = None
    return revert_sync_batchnorm(MODELS.build(cfg.model))


def batch_of(cfg, size):
    """Two random images with what the task's loss needs."""
    images = [torch.randint(256, (3, size, size), dtype=torch.uint8) for _ in range(2)]
    if cfg.default_scope == 'mmpretrain':
        samples = [DataSample().set_gt_label(i) for i in range(2)]
        return dict(inputs=torch.stack(images), data_samples=samples)
    if cfg.default_scope == 'mmdet':
        kwargs = dict(num_items=[3, 3], num_classes=5, with_mask=True, use_box_type=True)
        return demo_mm_inputs(2, (3, size, size), **kwargs)
    samples, meta = [], dict(img_shape=(size, size), ori_shape=(size, size))
    for _ in images:
        sample = SegDataSample(metainfo=meta)
        sample.gt_sem_seg = PixelData(data=torch.randint(0, 10, (1, size, size)))
        samples.append(sample)
    return dict(inputs=images, data_samples=samples)


def without_gradient(model, cfg, size):
    """Names of the parameters that a training step's loss has no gradient for."""
    model.train()
    data = model.data_preprocessor(batch_of(cfg, size), training=True)
    loss, _ = model.parse_losses(model(**data, mode='loss'))
    assert torch.isfinite(loss)
    loss.backward()
    return [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]


@pytest.mark.parametrize('name', NAMES)
def test_no_name_is_mistaken(name):
    """Hooks, and what differs from the stock counterpart: the backbone and a faster head."""
    cfg = Config.fromfile(config_path(name))
    assert cfg.custom_imports['imports'] == ['repa_mm']
    merges = 'repa' in name
    hook = cfg.default_hooks.pop('reparameterize', None)
    assert hook == (dict(type='ReparameterizeHook') if merges else None)
    assert 'ReparameterizeHook' not in str(cfg.get('custom_hooks'))
    if 'repa_swin' in name and 'in1k' not in name:
        stock = Config.fromfile(config_path(name.replace('repa_', '')))
        for key in set(stock) - {'model', 'pretrained'}:
            assert cfg[key] == stock[key], key
        if 'upernet' in name:
            assert cfg.model.decode_head.pop('type') == 'FastUPerHead'
            assert stock.model.decode_head.pop('type') == 'UPerHead'
        for key in set(stock.model) - {'backbone'}:
            assert cfg.model[key] == stock.model[key], key


QUICK = [name for name in NAMES if name.startswith('demo/') and 'repa' in name]
QUICK += ['swin_t_in1k', 'repa_deit_t_in1k', 'repa_poolformer_s12_in1k']
SLOW = ['retinanet_repa_swin_t', 'mask_rcnn_swin_t', 'upernet_repa_swin_t']


@pytest.mark.parametrize('name', QUICK + [pytest.param(n, marks=pytest.mark.slow) for n in SLOW])
def test_model_trains_a_step_and_merges(name, relative_error):
    cfg = load(name)
    if 'upernet' in name:
        cfg.model.data_preprocessor.size = (64, 64)
    if 'mask_rcnn' in name:
        cfg.model.train_cfg.rpn_proposal.max_per_img = 20
        cfg.model.train_cfg.rcnn.sampler.num = 16
    model, size = build(cfg), 224 if 'in1k' in name else 64
    optim_wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    if 'constructor' not in cfg.optim_wrapper:
        check_weight_decay(model, optim_wrapper.optimizer, cfg)
    assert not without_gradient(model, cfg, size), 'which distributed training needs everywhere'
    optim_wrapper.optimizer.step()
    # Schedules and their hooks come together, one hook for each name of a lambda, or for all.
    scalars = {m.scalar for m in model.modules() if hasattr(m, 'set_lam')}
    hooks = [h for h in cfg.get('custom_hooks') or [] if h['type'] == 'ScheduleHook']
    assert bool(scalars) == bool(hooks)
    if not any(isinstance(m, TrainingForm) for m in model.modules()):
        return
    # In float64: after one step BatchNorms do not normalize, and errors grow with depth.
    backbone = finish_schedules_(model).backbone.double()
    backbone.eval()
    x = torch.randn(1, 3, size, size, dtype=torch.double)
    with torch.no_grad():
        merged = reparameterize(backbone)
        for found, expected in zip(tensors(merged(x)), tensors(backbone(x)), strict=True):
            assert relative_error(found, expected) < 1e-10
    assert not any(isinstance(m, TrainingForm) for m in merged.modules())
    numbers = [sum(p.numel() for p in m.parameters()) for m in (merged, backbone)]
    assert numbers[0] < numbers[1]


def check_weight_decay(model, optimizer, cfg):
    """Norms of the backbone, position tables and, of classifiers, biases do not decay."""
    names = {id(p): n for n, p in model.named_parameters()}
    decays = {
        names[id(p)]: group['weight_decay']
        for group in optimizer.param_groups
        for p in group['params']
    }
    assert set(decays) == set(names.values())
    kinds = torch.nn.LayerNorm, _BatchNorm
    norms = tuple(f'{n}.' for n, m in model.named_modules() if isinstance(m, kinds))
    tables = ('position_bias_table', 'pos_embed', 'cls_token', 'layer_scale_1', 'layer_scale')
    biases = ('bias',) if cfg.default_scope == 'mmpretrain' else ()
    for name, decay in decays.items():
        is_of_backbone = name.startswith('backbone')
        if name.endswith(tables + biases) or is_of_backbone and name.startswith(norms):
            assert decay == 0, name
        elif is_of_backbone and name.endswith('weight') and model.get_parameter(name).ndim > 1:
            assert decay == cfg.optim_wrapper.optimizer.weight_decay, name


@pytest.mark.parametrize('name', [n for n in NAMES if re.search('repa.*(_t|_s12|_b16)($|_)', n)])
def test_norms_of_forms_decay_as_their_hosts(name, quick_init):
    """In each schedule; DETRs and the recipes of the docs are checked where they are built."""
    cfg = load(name)
    backbone = torch.nn.ModuleDict(dict(backbone=MODELS.build(cfg.model.backbone)))
    check_norms_decay_alike(backbone, cfg.optim_wrapper)


def learning_rates(cfg, lr, epoch_length, iters):
    """The learning rate of every iteration, as the runner's hook sets it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    how, rates = dict(optimizer=optimizer, epoch_length=epoch_length), []
    schedulers = [PARAM_SCHEDULERS.build(s, default_args=how) for s in cfg.param_scheduler]
    for i in range(iters):
        rates.append(optimizer.param_groups[0]['lr'])
        optimizer.step()
        for scheduler in schedulers:
            if not scheduler.by_epoch or (i + 1) % epoch_length == 0:
                scheduler.step()
    return rates


@pytest.mark.parametrize('model', TABLE_7)
def test_imagenet_training_is_that_of_table_7(model):
    cfg = load(f'repa_{model}_in1k')
    assert cfg.model.backbone.idle_ratio == 0.75
    check_imagenet_training(cfg, TABLE_7[model], 32, 4096, 'RepeatAugSampler')


def check_imagenet_training(cfg, row, gpus, batch_size, sampler):
    lr, min_lr, weight_decay, drop_path = row
    ours = cfg.optim_wrapper.optimizer
    assert (ours.type, ours.lr, ours.weight_decay) == ('Lamb', lr, weight_decay)
    assert cfg.model.backbone.drop_path_rate == drop_path
    assert cfg.train_cfg.max_epochs == 300
    assert gpus * cfg.train_dataloader.batch_size == batch_size
    assert cfg.auto_scale_lr == dict(enable=False, base_batch_size=batch_size)
    assert cfg.train_dataloader.sampler.type == sampler
    rates = learning_rates(cfg, lr, epoch_length=4, iters=1200)
    assert rates[0] == pytest.approx(1e-6)
    assert rates[80] == max(rates) == pytest.approx(lr)
    assert rates[-1] == min(rates[80:]) == pytest.approx(min_lr, rel=2e-2)


@pytest.mark.parametrize(
    ('task', 'original'),
    [
        ('retinanet', 'mmdet::swin/retinanet_swin-t-p4-w7_fpn_1x_coco'),
        ('mask_rcnn', 'mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco'),
        (
            'upernet',
            'mmseg::swin/swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512',
        ),
        ('', 'mmpretrain::swin_transformer/swin-tiny_16xb64_in1k'),
    ],
)
def test_stock_training_is_that_of_the_codebase(task, original):
    """What the codebase's config of the same model says, ours says, too, for each size."""
    theirs = Config.fromfile(config_path(original))
    theirs.model.backbone = None
    keys = ['model', 'optim_wrapper', 'param_scheduler', 'train_cfg', 'auto_scale_lr']
    keys += [f'{s}_{k}' for s in ('train', 'val', 'test') for k in ('dataloader', 'evaluator')]
    for name in [f'{task}_swin_t', f'{task}_swin_b'] if task else ['swin_t_in1k']:
        ours = load(name)
        ours.model.backbone = None
        if name.endswith('_b'):  # a wider backbone
            keys.remove('model')
        for key in set(keys) & set(theirs):
            check_inherited(theirs[key], ours[key], key)


def check_inherited(theirs, ours, where):
    if isinstance(theirs, dict):
        for key in set(theirs) - {'_scope_'}:
            check_inherited(theirs[key], ours[key], f'{where}.{key}')
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), where
        for i, pair in enumerate(zip(theirs, ours)):
            check_inherited(*pair, f'{where}[{i}]')
    else:
        assert ours == theirs, where


def test_imagenet_training_runs(tmp_path):
    cfg = load('repa_deit_t_in1k')
    arch = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=64)
    cfg.model.backbone.arch = arch
    cfg.model.head.in_channels = 16
    cfg.train_dataloader.sampler = dict(type='DefaultSampler', shuffle=True)  # for few images
    train_on_images(cfg, tmp_path)


def train_on_images(cfg, folder):
    """Train by MMEngine's Runner on eight images, validate, and test the merged model."""
    for split, numbers in (('train', range(8)), ('val', range(4))):
        for i in numbers:
            path = folder / split / f'n0000000{i % 2}' / f'n0000000{i % 2}_{i}.JPEG'
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = np.random.default_rng(i).integers(0, 256, (48, 48, 3), np.uint8)
            cv2.imwrite(str(path), noise)
    for split in ('train', 'val', 'test'):
        loader = cfg[f'{split}_dataloader']
        loader.update(num_workers=0, persistent_workers=False, batch_size=4)
        prefix = 'train' if split == 'train' else 'val'
        dataset = dict(type='CustomDataset', data_root=str(folder), data_prefix=prefix)
        loader.dataset = ConfigDict(dataset, pipeline=loader.dataset.pipeline)
    cfg.work_dir = str(folder / 'work')
    cfg.train_cfg.max_epochs = 1
    cfg.vis_backends = []
    cfg.env_cfg.dist_cfg.backend = 'gloo'
    runner = Runner.from_cfg(cfg)
    before = {k: v.clone() for k, v in runner.model.state_dict().items()}
    runner.train()
    changed = {k for k, v in runner.model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed >= {n for n, p in runner.model.named_parameters() if p.ndim > 1}
    assert 0 <= runner.test()['accuracy/top1'] <= 100


def test_a_config_elsewhere_changes_classes_and_data(tmp_path):
    """What docs/train.md says."""
    data_root = tmp_path / 'animals'
    for split in ('train2017', 'val2017'):
        (data_root / split).mkdir(parents=True)
        cv2.imwrite(str(data_root / split / '1.jpg'), np.zeros((48, 64, 3), np.uint8))
        box = dict(id=1, image_id=1, category_id=7, iscrowd=0, area=600, bbox=[10, 10, 30, 20])
        coco = dict(
            images=[dict(id=1, file_name='1.jpg', height=48, width=64)],
            categories=[dict(id=7, name='zebra'), dict(id=9, name='okapi')],
            annotations=[dict(box, segmentation=[[10, 10, 40, 10, 40, 30, 10, 30]])],
        )
        (data_root / 'annotations').mkdir(exist_ok=True)
        dump(coco, str(data_root / 'annotations' / f'instances_{split}.json'))
    docs = (ROOT.parent / 'docs' / 'train.md').read_text()
    (text,) = re.findall(r'<!-- data -->\n```python\n(.*?)```', docs, re.DOTALL)
    config = tmp_path / 'mine.py'
    text = text.replace('/path/to/repa-mm/configs', str(ROOT))
    config.write_text(text.replace('/data/animals', str(data_root)))
    cfg = load(str(config))
    for split in ('train', 'val', 'test'):
        dataset = cfg[f'{split}_dataloader'].dataset
        assert dataset.data_root == f'{data_root}/'
        dataset.filter_cfg = None
        item = DATASETS.build(dataset)[0]
        instances = item['data_samples'].gt_instances
        assert instances.labels.tolist() == [0]
        assert tuple(item['inputs'].shape[1:]) == (800, 1067)
    assert METRICS.build(cfg.test_evaluator)._coco_api.get_cat_ids() == [7, 9]
    model = build(cfg)
    assert model.backbone.stages[0].blocks[0].ffn.num_active == 384 / 4
    assert model.bbox_head.num_classes == 2
    check_norms_decay_alike(model, cfg.optim_wrapper)


@pytest.mark.parametrize('swin', ['repa_swin_t', 'swin_t'])
@pytest.mark.filterwarnings('ignore:.*norm_eval=True freezes')
def test_classifier_weights_pretrain_the_detector(swin, tmp_path, randomize):
    classifier = randomize(build(load(f'{swin}_in1k'))).backbone.state_dict()
    checkpoint = str(tmp_path / 'classifier.pth')
    torch.save(dict(state_dict={f'backbone.{k}': v for k, v in classifier.items()}), checkpoint)
    cfg = load(f'retinanet_{swin}').model.backbone
    cfg.init_cfg.checkpoint = checkpoint
    backbone = MODELS.build(cfg)
    backbone.init_weights()
    loaded = backbone.state_dict()
    # Only the last stage has a norm behind it in the classifier.
    assert {name.split('.')[0] for name in set(loaded) - set(classifier)} == {'norm1', 'norm2'}
    assert all(torch.equal(loaded[name], value) for name, value in classifier.items())


@pytest.mark.parametrize('task', ['retinanet', 'mask_rcnn', 'upernet'])
@pytest.mark.parametrize('size', ['tiny', 'small', 'base'])
def test_stock_configs_name_weights_of_mmpretrain(task, size):
    url = load(f'{task}_swin_{size[0]}').model.backbone.init_cfg.checkpoint
    metafile = config_path('mmpretrain::swin_transformer/swin-tiny_16xb64_in1k')
    models = load_file(Path(metafile).with_name('metafile.yml'))['Models']
    (model,) = (m for m in models if m['Name'] == f'swin-{size}_16xb64_in1k')
    # OneDL hosts the same file elsewhere.
    assert urlsplit(url).path == urlsplit(model['Weights']).path


def test_the_metafile_lists_the_configs():
    index = modelindex.load(str(ROOT.parent / 'model-index.yml'))
    assert not index.check(silent=True)
    configs = {model.name: model.config for model in index.models}
    assert configs == {n: f'configs/{n}.py' for n in NAMES if '/' not in n}
    assert {m.in_collection for m in index.models} == {c.name for c in index.collections}


@pytest.mark.parametrize('name', DETRS)
def test_detrs_train_a_step_and_merge(name, relative_error):
    cfg = load(name)
    hook = dict(type='ReparameterizeHook')
    assert cfg.default_hooks.reparameterize == hook and cfg.default_hooks.checkpoint
    cfg.model.model.backbone.init_cfg = None
    cfg.model.model.data_preprocessor.pop('batch_augments', None)  # pads to 1024 pixels
    if 'dino' in name:
        cfg.model.model.num_queries = 30  # of the tokens of small images
    model = MODELS.build(cfg.model)
    model.init_weights()
    forms = [n for n, m in model.named_modules() if isinstance(m, TrainingForm)]
    assert sum('encoder.layers' in n for n in forms) == 6
    assert sum(n.startswith('backbone') for n in forms) == (12 if 'swin' in name else 0)
    assert not [n for n in without_gradient(model, cfg, 64) if n.startswith(tuple(forms))]
    check_norms_decay_alike(model, cfg.optim_wrapper)
    if 'swin' in name:
        check_weight_decay(model, build_optim_wrapper(model, cfg.optim_wrapper).optimizer, cfg)
    model.eval()
    data = model.data_preprocessor(batch_of(cfg, 64), training=False)
    merged = reparameterize(model)
    assert not any(isinstance(m, TrainingForm) for m in merged.modules())
    with torch.no_grad():
        pairs = zip(tensors(head_inputs(merged, data)), tensors(head_inputs(model, data)))
        assert all(relative_error(a, b) < 1e-4 for a, b in pairs)
