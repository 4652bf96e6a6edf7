"""The configs: they load, build, train a step, and say what they should."""

import os.path as osp
import shutil
from glob import glob
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.fileio import dump, load
from mmengine.model.utils import revert_sync_batchnorm
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DATASETS, MODELS, PARAM_SCHEDULERS, init_default_scope
from torch.nn.modules.batchnorm import _BatchNorm

from repa_mm import config_path, reparameterize
from repa_mm.benchmark.paper import REPORTED, OnMeta
from repa_mm.engine.complexity import count_parameters
from repa_mm.paths import config_root
from repa_mm.run import runner_for_training

ROOT = Path(config_root())
# Those of DINO: test_dino_configs.py.
TOP = sorted(path.stem for path in ROOT.glob('*.py') if 'dino' not in path.stem)
DEMO = sorted(
    f'demo/{path.stem}' for path in (ROOT / 'demo').glob('*.py') if 'dino' not in path.stem
)
TASKS = ('retinanet', 'mask_rcnn', 'upernet')
WIDTHS = dict(tiny=96, small=96, base=128)

# RePaFormer table 7: learning rate, its minimum, weight decay, drop path; the
# model in the paper's tables.
TABLE_7 = dict(
    deit_t=(2.5e-3, 1e-6, 0.02, 0.02, 'DeiT-Tiny'),
    deit_s=(3e-3, 4e-5, 0.05, 0.04, 'DeiT-Small'),
    deit_b=(4e-3, 4e-5, 0.07, 0.10, 'DeiT-Base'),
    # Of the released commands.
    vit_l=(1e-3, 5e-5, 0.05, 0.3, 'ViT-Large'),
    vit_h=(1e-3, 5e-5, 0.05, 0.3, 'ViT-Huge'),
    swin_t=(5e-3, 5e-5, 0.20, 0.10, 'Swin-Tiny'),
    swin_s=(6e-3, 5e-5, 0.15, 0.09, 'Swin-Small'),
    swin_b=(4e-3, 2e-5, 0.10, 0.08, 'Swin-Base'),
    poolformer_s12=(2.5e-3, 6e-6, 0.16, 0.02, 'PoolFormer-s12'),
    poolformer_s24=(3.5e-3, 1.5e-6, 0.08, 0.01, 'PoolFormer-s24'),
    poolformer_s36=(5.5e-3, 3e-6, 0.01, 0.03, 'PoolFormer-s36'),
    mlp_mixer_b16=(5e-3, 5e-6, 0.13, 0.04, 'MLPMixer-b16'),
    mlp_mixer_l16=(4e-3, 1e-5, 0.16, 0.05, 'MLPMixer-l16'),
    lvvit_s=(1e-3, 1e-5, 0.05, 0.10, 'LV-ViT-S'),
    lvvit_m=(1e-3, 1e-5, 0.05, 0.10, 'LV-ViT-M'),
)
TYPES = dict(
    deit='VisionTransformer',
    vit='VisionTransformer',
    swin='SwinTransformer',
    poolformer='PoolFormer',
    mlp='MlpMixer',
    lvvit='LVViT',
)


def is_swin(name):
    return 'swin' in name


def load_config(name):
    """A config, ready to build from; skips without its codebase."""
    cfg = Config.fromfile(name if osp.isabs(name) else config_path(name))
    pytest.importorskip(cfg.default_scope)
    init_default_scope(cfg.default_scope)
    return cfg


def build(cfg, pretrained=None):
    cfg.model.backbone.init_cfg = pretrained
    return revert_sync_batchnorm(MODELS.build(cfg.model))


def batch_of(cfg, size):
    """Two random images with what the task's loss needs."""
    images = [torch.randint(256, (3, size, size), dtype=torch.uint8) for _ in range(2)]
    if cfg.default_scope == 'mmpretrain':
        from mmpretrain.structures import DataSample

        return dict(
            inputs=torch.stack(images),
            data_samples=[DataSample().set_gt_label(i) for i in range(2)],
        )
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

            sample = DetDataSample(metainfo=meta)
            masks = np.zeros((1, size, size), np.uint8)
            masks[:, 8:40, 8:40] = 1
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


def strings(node):
    """All strings in a part of a config."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from strings(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from strings(value)


def test_there_is_every_model_in_every_size():
    expected = (
        {
            f'{task}_{swin}_{size}'
            for task in TASKS
            for swin in ('swin', 'repa_swin')
            for size in 'tsb'
        }
        | {f'swin_{s}_in1k' for s in 'tsb'}
        | {f'repa_{m}_in1k' for m in TABLE_7}
    )
    assert set(TOP) == expected
    assert set(DEMO) == {
        f'demo/{task}_{swin}_digits' for task in TASKS for swin in ('swin', 'repa_swin')
    }


@pytest.mark.parametrize('name', TOP + DEMO)
def test_config_is_complete(name):
    cfg = Config.fromfile(config_path(name))
    repa = 'repa' in name
    backbone = cfg.model.backbone
    assert cfg.default_scope == dict(retinanet='mmdet', mask='mmdet', upernet='mmseg').get(
        osp.basename(name).split('_')[0], 'mmpretrain'
    )
    assert cfg.custom_imports['imports'] == ['repa_mm']
    family = name.split('_')[1] if 'in1k' in name and repa else 'swin'
    assert backbone.type == ('RePa' if repa else 'mmpretrain.') + TYPES[family]
    assert backbone.get('idle_ratio') == (None if not repa else 2 / 3 if 'lvvit' in name else 0.75)
    assert cfg.get('custom_hooks') == ([dict(type='ReparameterizeHook')] if repa else None)
    assert cfg.optim_wrapper.type == 'OptimWrapper'
    assert cfg.env_cfg.dist_cfg.backend == ('gloo' if 'demo' in name else 'nccl')
    # What differs between a RePa model and its counterpart is the backbone,
    # and a head that computes the same.
    if repa and 'in1k' not in name:
        vanilla = Config.fromfile(config_path(name.replace('repa_', '')))
        for key in vanilla:
            if key not in ('model', 'pretrained'):
                assert cfg[key] == vanilla[key], key
        if 'upernet' in name:
            assert cfg.model.decode_head.pop('type') == 'FastUPerHead'
            assert vanilla.model.decode_head.pop('type') == 'UPerHead'
        for key in vanilla.model:
            assert key == 'backbone' or cfg.model[key] == vanilla.model[key]

    if not is_swin(name):
        return
    arch = backbone.arch
    width = WIDTHS[arch] if isinstance(arch, str) else arch['embed_dims']
    stages = [width * 2**i for i in range(4)]
    model = cfg.model
    if 'retinanet' in name:
        assert backbone.out_indices == (1, 2, 3)
        assert model.neck.in_channels == stages[1:]
    elif 'mask_rcnn' in name:
        assert model.neck.in_channels == stages
    elif 'upernet' in name:
        assert model.decode_head.in_channels == stages
        assert model.auxiliary_head.in_channels == stages[2]
    else:
        assert model.head.in_channels == stages[3]
    if name in TOP and 'in1k' not in name:
        assert backbone.pad_small_map
        assert backbone.drop_path_rate == (0.3 if 'upernet' in name else 0.2)
        assert backbone.init_cfg == dict(
            type='Pretrained',
            checkpoint=f'checkpoints/{"repa_" * repa}swin_{arch}_in1k.pth',
            prefix='backbone.',
        )
        assert bool(backbone.get('norm_eval')) == repa


@pytest.mark.parametrize(
    'name',
    [n for n in TOP if '_t' in n or n in ('repa_poolformer_s12_in1k', 'repa_lvvit_s_in1k')]
    + [n for n in DEMO if 'repa' in n],
)
def test_model_trains_a_step(name):
    cfg = load_config(name)
    repa = 'repa' in name
    # Small, for speed.
    if 'upernet' in name:
        cfg.model.data_preprocessor.size = (64, 64)
    if 'mask_rcnn' in name:
        cfg.model.train_cfg.rpn_proposal.max_per_img = 20
        cfg.model.train_cfg.rcnn.sampler.num = 16
    model = build(cfg)
    model.train()
    norms = [m for n, m in model.backbone.named_modules() if n.endswith(('ffn.norm1', 'ffn.norm2'))]
    if is_swin(name):
        assert len(norms) == (2 * sum(model.backbone.depths) if repa else 0)
    for norm in norms:
        assert isinstance(norm, _BatchNorm) and norm.weight.requires_grad
        assert norm.training == (not cfg.model.backbone.get('norm_eval'))

    optim_wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    check_weight_decay(
        model,
        optim_wrapper.optimizer,
        cfg.optim_wrapper.optimizer.weight_decay,
        biases='in1k' in name,
    )
    size = 224 if 'in1k' in name else 64
    data = model.data_preprocessor(batch_of(cfg, size), training=True)
    loss, _ = model.parse_losses(model(**data, mode='loss'))
    assert torch.isfinite(loss)
    optim_wrapper.backward(loss)
    without = [n for n, p in model.named_parameters() if p.grad is None]
    assert not without, 'distributed training needs a gradient everywhere'
    optim_wrapper.step()


def check_weight_decay(model, optimizer, weight_decay, biases):
    """Norms of the backbone and relative position tables do not decay."""
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
    tables = {
        n
        for n in decays
        if n.endswith(
            (
                'relative_position_bias_table',
                'pos_embed',
                'cls_token',
                'layer_scale_1',
                'layer_scale',
            )
        )
    }
    weights = {
        n
        for n, p in model.named_parameters()
        if n.endswith('weight') and n.startswith('backbone') and p.ndim > 1
    }
    assert len(norms) > 20 and tables and weights
    for name, decay in decays.items():
        if name in norms | tables or biases and name.endswith('bias'):
            assert decay == 0, name
        elif name in weights:
            assert decay == weight_decay, name


@pytest.mark.parametrize(
    'option', [dict(norm_eval=False), dict(norm_eval=False, ffn_norm_cfg=dict(type='SyncBN'))]
)
def test_batch_norm_is_chosen_by_an_option(option):
    cfg = load_config('upernet_repa_swin_t')
    cfg.merge_from_dict(dict(model=dict(backbone=option)))
    cfg.model.backbone.init_cfg = None
    backbone = MODELS.build(cfg.model.backbone)
    backbone.train()
    norm = backbone.stages[0].blocks[0].ffn.norm1
    assert norm.training
    assert isinstance(norm, torch.nn.SyncBatchNorm) == (len(option) == 2)


@pytest.mark.parametrize('model', TABLE_7)
def test_imagenet_training_is_that_of_table_7(model):
    lr, min_lr, weight_decay, drop_path, paper = TABLE_7[model]
    cfg = load_config(f'repa_{model}_in1k')
    optimizer_cfg = cfg.optim_wrapper.optimizer
    assert (optimizer_cfg.type, optimizer_cfg.lr, optimizer_cfg.weight_decay) == (
        'Lamb',
        lr,
        weight_decay,
    )
    assert cfg.model.backbone.drop_path_rate == drop_path
    assert cfg.train_cfg.max_epochs == 300
    gpus = 8 if 'lvvit' in model else 32
    batch_size = gpus * cfg.train_dataloader.batch_size
    assert cfg.auto_scale_lr == dict(enable=False, base_batch_size=batch_size)
    assert batch_size == (1024 if 'lvvit' in model else 4096)
    assert cfg.train_dataloader.sampler.type == (
        'DefaultSampler' if 'lvvit' in model else 'RepeatAugSampler'
    )

    with OnMeta():
        classifier = MODELS.build(cfg.model)
    ((_, form, params, _),) = [row for row in REPORTED[paper] if row[1] == 'training']
    assert count_parameters(classifier) / 1e6 == pytest.approx(params, abs=0.06)

    rates = learning_rates(cfg, lr, epoch_length=4, iters=1200)
    assert rates[0] == pytest.approx(1e-6)
    assert rates[80] == max(rates) == pytest.approx(lr)
    assert rates[-1] == min(rates[80:]) == pytest.approx(min_lr, rel=2e-2)


SMALL = dict(
    VisionTransformer=dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=64),
    LVViT=dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=48),
    SwinTransformer=dict(embed_dims=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2]),
    PoolFormer=dict(layers=[1, 1, 1, 1], embed_dims=[4, 8, 12, 16]),
    MlpMixer=dict(embed_dims=16, num_layers=2, tokens_mlp_dims=8, channels_mlp_dims=64),
)


@pytest.fixture(scope='module')
def imagenet(tmp_path_factory):
    """Scans of digits in the layout of ImageNet, with label maps."""
    datasets = pytest.importorskip('sklearn.datasets')
    root = tmp_path_factory.mktemp('imagenet')
    digits = datasets.load_digits()
    for split, chosen in (('train', range(24)), ('val', range(24, 32))):
        for i in chosen:
            label = digits.target[i] % 2
            folder = root / split / f'n0000000{label}'
            folder.mkdir(parents=True, exist_ok=True)
            scan = np.kron(digits.images[i], np.ones((6, 6))) * 15
            cv2.imwrite(
                str(folder / f'{folder.name}_{i}.JPEG'),
                np.repeat(scan[..., None], 3, 2).astype(np.uint8),
            )
            maps = root / 'maps' / folder.name
            maps.mkdir(parents=True, exist_ok=True)
            scores = torch.zeros(5, 6, 6) + torch.tensor([9.0, 1, 0, 0, 0]).view(5, 1, 1)
            classes = torch.tensor([label, 1 - label, 2, 3, 4])
            torch.save(
                torch.stack([scores, classes.view(5, 1, 1).expand(5, 6, 6)]).half(),
                str(maps / f'{folder.name}_{i}.pt'),
            )
    return root


@pytest.mark.parametrize('model', [*TABLE_7, pytest.param('lvvit_s', id='lvvit_s without maps')])
def test_imagenet_training_runs(model, imagenet, tmp_path, request):
    """Two updates of two batches each, validation, test of the merged model."""
    name = f'repa_{model}_in1k'
    cfg = load_config(name)
    family = TYPES[model.split('_')[0]]
    arch = dict(SMALL[family], _delete_=True)
    options = {
        'model.backbone.arch': arch,
        'model.backbone.idle_ratio': 0.5,
        'model.head.in_channels': {'SwinTransformer': 64}.get(family, 16),
        'train_cfg.max_epochs': 1,
        'train_dataloader.batch_size': 4,
        'optim_wrapper.accumulative_counts': 2,
        'default_hooks.logger.interval': 1,
        'vis_backends': [],
        'env_cfg.dist_cfg.backend': 'gloo',
    }
    pipeline = cfg.train_dataloader.dataset.pipeline
    if model.startswith('lvvit'):
        without = 'without' in request.node.name
        pipeline[1].label_root = None if without else str(imagenet / 'maps')
    for split in ('train', 'val', 'test'):
        options[f'{split}_dataloader.num_workers'] = 0
        options[f'{split}_dataloader.persistent_workers'] = False
        options[f'{split}_dataloader.dataset'] = dict(
            _delete_=True,
            type='CustomDataset',
            data_root=str(imagenet),
            data_prefix='train' if split == 'train' else 'val',
            pipeline=pipeline if split == 'train' else cfg.test_dataloader.dataset.pipeline,
        )
    runner = runner_for_training(config_path(name), str(tmp_path), cfg_options=options)
    before = {k: v.clone() for k, v in runner.model.state_dict().items()}
    runner.train()
    assert runner.iter == 6
    changed = {k for k, v in runner.model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed >= {n for n, p in runner.model.named_parameters() if p.ndim > 1}
    losses = [v for k, v in runner.message_hub.log_scalars.items() if 'loss' in k]
    assert losses and all(np.isfinite(x) for loss in losses for x in loss._log_history)
    # Through the hook, which merges.
    metrics = runner.test()
    assert 0 <= metrics['accuracy/top1'] <= 100


def learning_rates(cfg, lr, epoch_length, iters):
    """The learning rate of every iteration, as the runner's hook sets it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedulers = []
    for scheduler in cfg.param_scheduler:
        scheduler = scheduler.copy()
        convert = scheduler.pop('convert_to_iter_based', False)
        cls = PARAM_SCHEDULERS.get(scheduler.pop('type'))
        schedulers.append(
            cls.build_iter_from_epoch(optimizer, epoch_length=epoch_length, **scheduler)
            if convert
            else cls(optimizer, **scheduler)
        )
    rates = []
    for i in range(iters):
        rates.append(optimizer.param_groups[0]['lr'])
        optimizer.step()
        for scheduler in schedulers:
            if not scheduler.by_epoch or (i + 1) % epoch_length == 0:
                scheduler.step()
    return rates


@pytest.mark.parametrize(
    'name,optimizer,lr,weight_decay,length',
    [
        ('retinanet_repa_swin_b', 'SGD', 0.01, 1e-4, 12),
        ('mask_rcnn_repa_swin_b', 'AdamW', 1e-4, 0.05, 12),
        ('upernet_repa_swin_b', 'AdamW', 6e-5, 0.01, 160000),
    ],
)
def test_dense_schedules(name, optimizer, lr, weight_decay, length):
    cfg = load_config(name)
    ours = cfg.optim_wrapper.optimizer
    assert (ours.type, ours.lr, ours.weight_decay) == (optimizer, lr, weight_decay)
    assert cfg.train_dataloader.batch_size == 2
    assert cfg.auto_scale_lr == dict(enable=False, base_batch_size=16)
    if length == 160000:
        assert cfg.train_cfg.max_iters == length
        cfg.param_scheduler[0]['end'] = cfg.param_scheduler[1]['begin'] = 15
        cfg.param_scheduler[1]['end'] = 1600
        rates = learning_rates(cfg, lr, epoch_length=1, iters=1600)
        assert rates[0] == pytest.approx(lr * 1e-6)
        assert rates[15] == max(rates) == pytest.approx(lr)
        assert rates[807] == pytest.approx(lr / 2, rel=1e-2)
    else:
        assert cfg.train_cfg.max_epochs == length
        rates = learning_rates(cfg, lr, epoch_length=1000, iters=12000)
        assert rates[0] == pytest.approx(lr * 1e-3)
        assert rates[1000] == rates[7999] == pytest.approx(lr)
        assert rates[8000] == rates[10999] == pytest.approx(lr / 10)
        assert rates[11000] == rates[11999] == pytest.approx(lr / 100)


def write_coco(root):
    """A COCO data set of one image with one animal, a zebra."""
    for split in ('train', 'val'):
        (root / f'{split}2017').mkdir(parents=True)
        cv2.imwrite(
            str(root / f'{split}2017' / '1.jpg'),
            np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8),
        )
        (root / 'annotations').mkdir(exist_ok=True)
        dump(
            dict(
                images=[dict(id=1, file_name='1.jpg', height=48, width=64)],
                categories=[dict(id=7, name='zebra'), dict(id=9, name='okapi')],
                annotations=[
                    dict(
                        id=1,
                        image_id=1,
                        category_id=7,
                        iscrowd=0,
                        area=600,
                        bbox=[10, 10, 30, 20],
                        segmentation=[[10, 10, 40, 10, 40, 30, 10, 30]],
                    )
                ],
            ),
            str(root / 'annotations' / f'instances_{split}2017.json'),
        )


@pytest.mark.parametrize('task', ['retinanet', 'mask_rcnn'])
def test_a_config_elsewhere_changes_classes_data_and_idle_ratio(task, tmp_path):
    # What the comment in configs/_base_/datasets/coco_detection.py says.
    data_root = tmp_path / 'animals'
    write_coco(data_root)
    heads = dict(
        retinanet='bbox_head=dict(num_classes=2)',
        mask_rcnn='roi_head=dict(bbox_head=dict(num_classes=2), mask_head=dict(num_classes=2))',
    )
    config = tmp_path / 'mine.py'
    config.write_text(f"""
_base_ = {config_path(f'{task}_repa_swin_t')!r}
model = dict(backbone=dict(idle_ratio=0.5), {heads[task]})
data_root = '{data_root}/'
metainfo = dict(classes=('zebra', 'okapi'))
train_dataloader = dict(dataset=dict(data_root=data_root, metainfo=metainfo))
val_dataloader = dict(dataset=dict(data_root=data_root, metainfo=metainfo))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val2017.json')
test_evaluator = val_evaluator
""")
    cfg = load_config(str(config))
    left = [
        s
        for key in cfg
        if key.endswith(('_dataloader', '_evaluator'))
        for s in strings(cfg[key])
        if s.startswith('data/')
    ]
    assert not left
    assert cfg.model.backbone.arch == 'tiny'
    for split in ('train', 'val', 'test'):
        dataset_cfg = cfg[f'{split}_dataloader'].dataset
        dataset_cfg.filter_cfg = None
        item = DATASETS.build(dataset_cfg)[0]
        instances = item['data_samples'].gt_instances
        assert instances.labels.tolist() == [0]
        assert ('masks' in instances) == (task == 'mask_rcnn')
        assert tuple(item['inputs'].shape[1:]) == (800, 1067)
    from mmdet.registry import METRICS

    assert METRICS.build(cfg.val_evaluator)._coco_api.get_cat_ids() == [7, 9]

    model = build(cfg)
    assert model.backbone.stages[0].blocks[0].ffn.num_active == 384 / 2
    head = model.bbox_head if task == 'retinanet' else model.roi_head.bbox_head
    assert head.num_classes == 2


def test_a_config_elsewhere_changes_classes_and_data_of_segmentation(tmp_path):
    data_root = tmp_path / 'roads'
    for split in ('training', 'validation'):
        for part, suffix in (('images', 'jpg'), ('annotations', 'png')):
            folder = data_root / part / split
            folder.mkdir(parents=True)
            cv2.imwrite(
                str(folder / f'1.{suffix}'),
                np.ones((600, 700, 3)[: 3 if suffix == 'jpg' else 2], np.uint8),
            )
    config = tmp_path / 'mine.py'
    config.write_text(f"""
_base_ = {config_path('upernet_repa_swin_s')!r}
model = dict(
    backbone=dict(idle_ratio=1.),
    decode_head=dict(num_classes=2),
    auxiliary_head=dict(num_classes=2))
data = dict(
    type='BaseSegDataset', data_root={str(data_root)!r},
    img_suffix='.jpg', seg_map_suffix='.png', reduce_zero_label=True,
    metainfo=dict(classes=('road', 'sky')))
train_dataloader = dict(dataset=data)
val_dataloader = dict(dataset=data)
test_dataloader = val_dataloader
""")
    cfg = load_config(str(config))
    for split in ('train', 'val', 'test'):
        dataset = DATASETS.build(cfg[f'{split}_dataloader'].dataset)
        assert dataset.metainfo['classes'] == ('road', 'sky')
        item = dataset[0]
        size = tuple(item['inputs'].shape[1:])
        assert max(size) <= 512 if split == 'train' else size == (512, 597)
        labels = item['data_samples'].gt_sem_seg.data
        assert set(labels.unique().tolist()) <= {0, 255}
    backbone = MODELS.build(dict(cfg.model.backbone, init_cfg=None))
    assert backbone.stages[0].blocks[0].ffn.num_active == 0
    reparameterize(backbone)


def test_imagenet_pipelines(tmp_path):
    for split in ('train', 'val'):
        (tmp_path / split / 'n01440764').mkdir(parents=True)
        cv2.imwrite(
            str(tmp_path / split / 'n01440764' / '1.jpg'), np.full((260, 300, 3), 77, np.uint8)
        )
    cfg = load_config('repa_swin_b_in1k')
    for split in ('train', 'val'):
        dataset = cfg[f'{split}_dataloader'].dataset
        # ImageNet itself insists on a thousand folders.
        del dataset.split
        dataset.update(type='CustomDataset', data_root=str(tmp_path), data_prefix=split)
        item = DATASETS.build(dataset)[0]
        assert item['inputs'].shape == (3, 224, 224)


@pytest.mark.parametrize('name', ['retinanet_repa_swin_t', 'upernet_swin_t'])
def test_test_time_augmentation(name, tmp_path):
    from mmengine.dataset import Compose, pseudo_collate

    cfg = load_config(name)
    model = build(cfg)
    cfg.tta_model.module = model.eval()
    tta_model = MODELS.build(cfg.tta_model)
    image = str(tmp_path / '1.jpg')
    cv2.imwrite(image, np.zeros((64, 96, 3), np.uint8))
    for step in cfg.tta_pipeline[1].transforms[0]:
        step.update(
            dict(scale=(96, 64)) if 'scale' in step else dict(scale_factor=step['scale_factor'] / 2)
        )
    # Without the ground truth, which only drawing needs.
    cfg.tta_pipeline[1].transforms = [
        steps for steps in cfg.tta_pipeline[1].transforms if 'Annotations' not in steps[0]['type']
    ]
    data = Compose(cfg.tta_pipeline)(dict(img_path=image, img_id=1))
    assert len(data['inputs']) == (2 if 'retinanet' in name else 12)
    with torch.no_grad():
        (sample,) = tta_model.test_step(pseudo_collate([data]))
    if 'retinanet' in name:
        assert sample.pred_instances.bboxes.shape[1] == 4
    else:
        assert sample.pred_sem_seg.data.shape[-2:] == (64, 96)


@pytest.mark.parametrize('repa', [False, True])
def test_classifier_weights_pretrain_the_detector(repa, tmp_path, randomize):
    swin = 'repa_swin_t' if repa else 'swin_t'
    classifier = randomize(build(load_config(f'{swin}_in1k')))
    checkpoint = str(tmp_path / 'classifier.pth')
    torch.save(dict(state_dict=classifier.state_dict()), checkpoint)
    cfg = load_config(f'retinanet_{swin}')
    init_cfg = dict(cfg.model.backbone.init_cfg, checkpoint=checkpoint)
    cfg.model.backbone.init_cfg = init_cfg
    backbone = MODELS.build(cfg.model.backbone)
    backbone.init_weights()
    expected = classifier.backbone.state_dict()
    loaded = backbone.state_dict()
    # Only the last stage has a norm behind it in the classifier.
    assert set(loaded) - set(expected) == {
        f'norm{i}.{key}' for i in (1, 2) for key in ('weight', 'bias')
    }
    for name, value in expected.items():
        assert torch.equal(loaded[name], value), name


def test_metafile_lists_the_configs(tmp_path):
    from mmengine.config.utils import _get_cfg_metainfo

    models = load(str(ROOT / 'metafile.yml'))['Models']
    assert sorted(m['Name'] for m in models) == TOP
    mim = tmp_path / '.mim'
    mim.mkdir()
    shutil.copytree(str(ROOT), str(mim / 'configs'))
    (mim / 'model-index.yml').write_text('Import:\n  - configs/metafile.yml\n')
    for name in TOP:
        meta = _get_cfg_metainfo(str(tmp_path), f'{name}.py')
        assert meta['Name'] == name
        assert (mim / meta['Config']).is_file()


def test_no_config_depends_on_another_package():
    for path in glob(str(ROOT / '**' / '*.py'), recursive=True):
        assert '::' not in Path(path).read_text()
