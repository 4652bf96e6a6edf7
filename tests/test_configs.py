"""The configs: they build, train a step, merge, and say what papers and codebases say."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.fileio import dump
from mmengine.model.utils import revert_sync_batchnorm
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DATASETS, METRICS, MODELS, PARAM_SCHEDULERS, init_default_scope
from mmengine.runner import Runner
from torch.nn.modules.batchnorm import _BatchNorm

from repa_mm import config_path, reparameterize
from repa_mm.reparam import Scheduled, TrainingForm, finish_schedules
from repa_mm.run.features import head_inputs, tensors

ROOT = Path(config_path('swin_t_in1k')).parent
NAMES = sorted(
    path.relative_to(ROOT).with_suffix('').as_posix() for path in ROOT.glob('[!_]*/*.py')
)
NAMES = [name for name in NAMES if not name.startswith('_base_')]
NAMES += sorted(path.stem for path in ROOT.glob('*.py'))
DETRS = [name for name in NAMES if name.startswith('detr/')]
# test_dino_configs.py
NAMES = [name for name in NAMES if name not in DETRS and 'dino' not in name]

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
    lvvit_s=(1e-3, 1e-5, 0.05, 0.10),
    lvvit_m=(1e-3, 1e-5, 0.05, 0.10),
)


def load(name):
    """A config, ready to build from; skips without its codebase."""
    cfg = Config.fromfile(config_path(name) if not str(name).startswith('/') else name)
    pytest.importorskip(cfg.default_scope)
    init_default_scope(cfg.default_scope)
    return cfg


def build(cfg):
    cfg.model.backbone.init_cfg = None
    return revert_sync_batchnorm(MODELS.build(cfg.model))


def batch_of(cfg, size):
    """Two random images with what the task's loss needs."""
    images = [torch.randint(256, (3, size, size), dtype=torch.uint8) for _ in range(2)]
    if cfg.default_scope == 'mmpretrain':
        from mmpretrain.structures import DataSample

        samples = [DataSample().set_gt_label(i) for i in range(2)]
        return dict(inputs=torch.stack(images), data_samples=samples)
    from mmengine.structures import InstanceData, PixelData

    meta = dict(img_shape=(size, size), ori_shape=(size, size), scale_factor=(1.0, 1.0))
    samples = []
    for _ in images:
        if cfg.default_scope == 'mmseg':
            from mmseg.structures import SegDataSample

            sample = SegDataSample(metainfo=meta)
            sample.gt_sem_seg = PixelData(data=torch.randint(0, 10, (1, size, size)))
        else:
            from mmdet.structures import DetDataSample
            from mmdet.structures.bbox import HorizontalBoxes
            from mmdet.structures.mask import BitmapMasks

            masks = np.zeros((1, size, size), np.uint8)
            masks[:, 8:40, 8:40] = 1
            sample = DetDataSample(metainfo=meta)
            sample.gt_instances = InstanceData(
                bboxes=HorizontalBoxes(torch.tensor([[8.0, 8.0, 40.0, 40.0]])),
                labels=torch.tensor([3]),
                masks=BitmapMasks(masks, size, size),
            )
            sample.ignored_instances = InstanceData(
                bboxes=HorizontalBoxes(torch.zeros(0, 4)), labels=torch.zeros(0, dtype=torch.long)
            )
        samples.append(sample)
    return dict(inputs=images, data_samples=samples)


@pytest.mark.parametrize('name', NAMES)
def test_no_name_is_mistaken(name):
    """Hooks, and what differs from the vanilla counterpart: the backbone and a faster head."""
    cfg = Config.fromfile(config_path(name))
    assert cfg.custom_imports['imports'] == ['repa_mm']
    merges = 'mae' not in name and any(k in name for k in ('repa', 'structures/')) - (
        '/vit' in name
    )
    hooks = [hook['type'] for hook in cfg.get('custom_hooks') or []]
    assert hooks[-1:] == ['ReparameterizeHook'] * merges
    if 'repa_swin' in name and 'structures' not in name and 'in1k' not in name:
        vanilla = Config.fromfile(config_path(name.replace('repa_', '')))
        for key in set(vanilla) - {'model', 'pretrained', 'custom_hooks'}:
            assert cfg[key] == vanilla[key], key
        if 'upernet' in name:
            assert cfg.model.decode_head.pop('type') == 'FastUPerHead'
            assert vanilla.model.decode_head.pop('type') == 'UPerHead'
        for key in set(vanilla.model) - {'backbone'}:
            assert cfg.model[key] == vanilla.model[key], key


QUICK = [name for name in NAMES if name.startswith('demo/') and 'repa' in name]
QUICK += ['swin_t_in1k', 'repa_deit_t_in1k', 'repa_poolformer_s12_in1k', 'repa_lvvit_s_in1k']
STRUCTURES = [
    n for n in NAMES if n.startswith('structures/') and '_mae' not in n and '/vit' not in n
]
QUICK += [n for n in STRUCTURES if 'deit_t' in n or 'vit_t_3' in n or 'riformer' in n]
QUICK += ['structures/progressive_repa_swin_t_in1k']
SLOW = ['retinanet_repa_swin_t', 'mask_rcnn_swin_t', 'upernet_repa_swin_t', *STRUCTURES]


@pytest.mark.parametrize(
    'name', QUICK + [pytest.param(n, marks=pytest.mark.slow) for n in SLOW if n not in QUICK]
)
def test_model_trains_a_step_and_merges(name, relative_error):
    cfg = load(name)
    if 'upernet' in name:
        cfg.model.data_preprocessor.size = (64, 64)
    if 'mask_rcnn' in name:
        cfg.model.train_cfg.rpn_proposal.max_per_img = 20
        cfg.model.train_cfg.rcnn.sampler.num = 16
    model = build(cfg)
    model.train()
    optim_wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    if 'structures/parallel_vit' not in name:
        check_weight_decay(model, optim_wrapper.optimizer, cfg)
    size = 224 if 'in1k' in name else 64
    data = model.data_preprocessor(batch_of(cfg, size), training=True)
    loss, _ = model.parse_losses(model(**data, mode='loss'))
    assert torch.isfinite(loss)
    optim_wrapper.backward(loss)
    without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without, 'distributed training needs a gradient everywhere'
    optim_wrapper.step()
    # Schedules and their hooks come together, one hook for each name of a lambda, or for all.
    scalars = {m.scalar for m in model.modules() if isinstance(m, Scheduled)}
    hooks = [h for h in cfg.get('custom_hooks') or [] if h['type'] == 'ScheduleHook']
    assert bool(scalars) == bool(hooks)
    if not any(isinstance(m, TrainingForm) for m in model.modules()):
        return
    # In float64: after one step BatchNorms do not normalize, and errors grow with depth.
    backbone = finish_schedules(model).backbone.double()
    backbone.eval()
    x = torch.randn(1, 3, size, size, dtype=torch.double)
    with torch.no_grad():
        merged = reparameterize(backbone)
        for found, expected in zip(merged(x), backbone(x)):
            if isinstance(found, tuple):  # of LV-ViT, with the box that was mixed
                found, expected = found[0], expected[0]
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
    norms = {
        f'backbone.{name}.{key}'
        for name, m in model.backbone.named_modules()
        if isinstance(m, (torch.nn.LayerNorm, _BatchNorm))
        for key, _ in m.named_parameters()
    }
    tables = ('position_bias_table', 'pos_embed', 'cls_token', 'layer_scale_1', 'layer_scale')
    biases = ('bias',) if cfg.default_scope == 'mmpretrain' else ()
    for name, decay in decays.items():
        if name in norms or name.endswith(tables + biases):
            assert decay == 0, name
        elif (
            name.startswith('backbone')
            and name.endswith('weight')
            and model.get_parameter(name).ndim > 1
        ):
            assert decay == cfg.optim_wrapper.optimizer.weight_decay, name


def learning_rates(cfg, lr, epoch_length, iters):
    """The learning rate of every iteration, as the runner's hook sets it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedulers = []
    for scheduler in cfg.param_scheduler:
        scheduler = scheduler.copy()
        convert = scheduler.pop('convert_to_iter_based', False)
        cls = PARAM_SCHEDULERS.get(scheduler.pop('type'))
        if convert:
            scheduler['epoch_length'] = epoch_length
            cls = cls.build_iter_from_epoch
        schedulers.append(cls(optimizer, **scheduler))
    rates = []
    for i in range(iters):
        rates.append(optimizer.param_groups[0]['lr'])
        optimizer.step()
        for scheduler in schedulers:
            if not scheduler.by_epoch or (i + 1) % epoch_length == 0:
                scheduler.step()
    return rates


@pytest.mark.parametrize('model', TABLE_7)
def test_imagenet_training_is_that_of_table_7(model):
    lr, min_lr, weight_decay, drop_path = TABLE_7[model]
    cfg = load(f'repa_{model}_in1k')
    ours = cfg.optim_wrapper.optimizer
    assert (ours.type, ours.lr, ours.weight_decay) == ('Lamb', lr, weight_decay)
    assert cfg.model.backbone.drop_path_rate == drop_path
    assert cfg.model.backbone.idle_ratio == (2 / 3 if 'lvvit' in model else 0.75)
    assert cfg.train_cfg.max_epochs == 300
    gpus, batch_size, sampler = 32, 4096, 'RepeatAugSampler'
    if 'lvvit' in model:
        gpus, batch_size, sampler = 8, 1024, 'DefaultSampler'
    assert gpus * cfg.train_dataloader.batch_size == batch_size
    assert cfg.auto_scale_lr == dict(enable=False, base_batch_size=batch_size)
    assert cfg.train_dataloader.sampler.type == sampler
    rates = learning_rates(cfg, lr, epoch_length=4, iters=1200)
    assert rates[0] == pytest.approx(1e-6)
    assert rates[80] == max(rates) == pytest.approx(lr)
    assert rates[-1] == min(rates[80:]) == pytest.approx(min_lr, rel=2e-2)


def test_dense_schedules_are_those_of_the_codebases():
    for name, optimizer, lr in (('retinanet', 'SGD', 0.01), ('mask_rcnn', 'AdamW', 1e-4)):
        cfg = load(f'{name}_repa_swin_b')
        assert (cfg.optim_wrapper.optimizer.type, cfg.train_cfg.max_epochs) == (optimizer, 12)
        rates = learning_rates(cfg, lr, epoch_length=1000, iters=12000)
        assert rates[::1000][1:] == pytest.approx([lr] * 7 + [lr / 10] * 3 + [lr / 100])
    cfg = load('upernet_repa_swin_b')
    assert cfg.optim_wrapper.optimizer.lr == 6e-5 and cfg.train_cfg.max_iters == 160000
    cfg.param_scheduler[0]['end'] = cfg.param_scheduler[1]['begin'] = 15
    cfg.param_scheduler[1]['end'] = 1600
    rates = learning_rates(cfg, 6e-5, epoch_length=1, iters=1600)
    assert rates[15] == max(rates) == pytest.approx(6e-5) and rates[-1] < 1e-7


@pytest.mark.parametrize('maps', [True, False])
def test_imagenet_training_runs(maps, tmp_path, monkeypatch):
    """By MMEngine's Runner: LV-ViT with label maps and without, validation, the merged test."""
    for split, numbers in (('train', range(8)), ('val', range(4))):
        for i in numbers:
            folder = tmp_path / split / f'n0000000{i % 2}'
            folder.mkdir(parents=True, exist_ok=True)
            noise = np.random.default_rng(i).integers(0, 256, (48, 48, 3), np.uint8)
            cv2.imwrite(str(folder / f'{folder.name}_{i}.JPEG'), noise)
            scores = torch.zeros(5, 6, 6) + torch.tensor([9.0, 1, 0, 0, 0]).view(5, 1, 1)
            classes = torch.tensor([i % 2, 1 - i % 2, 2, 3, 4]).view(5, 1, 1).expand(5, 6, 6)
            (tmp_path / 'maps' / folder.name).mkdir(parents=True, exist_ok=True)
            path = tmp_path / 'maps' / folder.name / f'{folder.name}_{i}.pt'
            torch.save(torch.stack([scores, classes]).half(), path)
    cfg = load('repa_lvvit_s_in1k')
    arch = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=48)
    cfg.model.backbone.arch = arch
    cfg.model.head.in_channels = 16
    train = cfg.train_dataloader.dataset.pipeline
    train[1].label_root = str(tmp_path / 'maps') if maps else None
    for split in ('train', 'val', 'test'):
        loader = cfg[f'{split}_dataloader']
        loader.update(num_workers=0, persistent_workers=False, batch_size=4)
        loader.dataset = Config(
            dict(
                type='CustomDataset',
                data_root=str(tmp_path),
                data_prefix='train' if split == 'train' else 'val',
                pipeline=train if split == 'train' else cfg.test_dataloader.dataset.pipeline,
            )
        )._cfg_dict
    monkeypatch.setattr(Config, 'pretty_text', '')  # takes seconds
    cfg.work_dir = str(tmp_path / 'work')
    cfg.train_cfg.max_epochs = 1
    cfg.vis_backends = []
    cfg.env_cfg.dist_cfg.backend = 'gloo'
    runner = Runner.from_cfg(cfg)
    before = {k: v.clone() for k, v in runner.model.state_dict().items()}
    runner.train()
    changed = {k for k, v in runner.model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed >= {n for n, p in runner.model.named_parameters() if p.ndim > 1}
    assert 0 <= runner.test()['accuracy/top1'] <= 100


def test_a_config_elsewhere_changes_classes_data_and_idle_ratio(tmp_path):
    """What the comment in configs/_base_/datasets/coco_detection.py says."""
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
    config = tmp_path / 'mine.py'
    config.write_text(f"""
_base_ = {config_path('mask_rcnn_repa_swin_t')!r}
heads = dict(bbox_head=dict(num_classes=2), mask_head=dict(num_classes=2))
model = dict(backbone=dict(idle_ratio=0.5), roi_head=heads)
data_root = '{data_root}/'
metainfo = dict(classes=('zebra', 'okapi'))
train_dataloader = dict(dataset=dict(data_root=data_root, metainfo=metainfo))
val_dataloader = dict(dataset=dict(data_root=data_root, metainfo=metainfo))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val2017.json')
test_evaluator = val_evaluator
""")
    cfg = load(str(config))
    for split in ('train', 'val', 'test'):
        dataset = cfg[f'{split}_dataloader'].dataset
        assert dataset.data_root == f'{data_root}/'
        dataset.filter_cfg = None
        item = DATASETS.build(dataset)[0]
        instances = item['data_samples'].gt_instances
        assert instances.labels.tolist() == [0] and 'masks' in instances
        assert tuple(item['inputs'].shape[1:]) == (800, 1067)
    assert METRICS.build(cfg.test_evaluator)._coco_api.get_cat_ids() == [7, 9]
    model = build(cfg)
    assert model.backbone.stages[0].blocks[0].ffn.num_active == 384 / 2
    assert model.roi_head.bbox_head.num_classes == 2


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


def test_pretraining_leads_to_the_classifier(tmp_path):
    """A masked autoencoder with branches trains a step, and its weights start the classifier."""
    cfg = load('structures/parallel_vit_t_3_mae')
    cfg.model.neck.update(decoder_depth=1, decoder_embed_dim=64)
    model = MODELS.build(cfg.model)
    model.init_weights()
    model.train()
    optim_wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    images = torch.randint(256, (2, 3, 224, 224), dtype=torch.uint8)
    data = model.data_preprocessor(dict(inputs=images, data_samples=[None] * 2), training=True)
    optim_wrapper.backward(model(data['inputs'], None, mode='loss')['loss'])
    assert not [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    optim_wrapper.step()
    path = str(tmp_path / 'mae.pth')
    torch.save(dict(state_dict=model.state_dict()), path)
    cfg = load('structures/parallel_vit_t_3_in1k')
    cfg.model.backbone.init_cfg.checkpoint = path
    classifier = MODELS.build(cfg.model)
    classifier.init_weights()
    loaded = classifier.backbone.state_dict()
    # Mean features have a norm of their own.
    for key in set(loaded) - {'ln2.weight', 'ln2.bias'}:
        assert torch.equal(loaded[key], model.backbone.state_dict()[key]), key


def test_the_metafile_lists_the_configs():
    modelindex = pytest.importorskip('modelindex')
    index = modelindex.load(str(ROOT.parent / 'model-index.yml'))
    assert not index.check(silent=True)
    configs = {model.name: model.config for model in index.models}
    assert configs == {n: f'configs/{n}.py' for n in NAMES if '/' not in n}
    assert {m.in_collection for m in index.models} == {c.name for c in index.collections}


def test_no_config_depends_on_another_package():
    # '_base_ = "mmseg::..."' fails with OneDL's distributions.
    paths = [path for path in ROOT.rglob('*.py') if '::' in path.read_text()]
    assert sorted(path.relative_to(ROOT).with_suffix('').as_posix() for path in paths) == DETRS


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
    model.train()
    forms = [n for n, m in model.named_modules() if isinstance(m, TrainingForm)]
    assert sum('encoder.layers' in n for n in forms) == 6
    assert sum(n.startswith('backbone') for n in forms) == (12 if 'swin' in name else 0)
    data = model.data_preprocessor(batch_of(cfg, 64), training=True)
    loss, _ = model.parse_losses(model(**data, mode='loss'))
    loss.backward()
    without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not [n for n in without if any(n.startswith(form) for form in forms)]
    if 'swin' in name:
        check_weight_decay(model, build_optim_wrapper(model, cfg.optim_wrapper).optimizer, cfg)
    model.eval()
    data = model.data_preprocessor(batch_of(cfg, 64), training=False)
    merged = reparameterize(model)
    assert not any(isinstance(m, TrainingForm) for m in merged.modules())
    with torch.no_grad():
        pairs = zip(tensors(head_inputs(merged, data)), tensors(head_inputs(model, data)))
        assert all(relative_error(a, b) < 1e-4 for a, b in pairs)
