# ATSS with a DINOv2 ViT-S/14, on the crowns of trees that
# `benchmarks/trees.py` writes, from the weights that it writes.
_base_ = [
    'mmdet::_base_/datasets/coco_detection.py',
    '../_base_/schedules/coco_1x_adamw.py',
    '../_base_/runtime/mmdet.py',
]

norm_cfg = dict(type='GN', num_groups=16)
model = dict(
    type='ATSS',
    data_preprocessor=dict(
        type='DetDataPreprocessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_size_divisor=14,
    ),
    backbone=dict(
        type='mmpretrain.VisionTransformer',
        arch='dinov2-small',
        img_size=280,
        patch_size=14,
        layer_scale_init_value=1e-5,
        out_type='featmap',
        out_indices=[11],
        init_cfg=dict(type='Pretrained', checkpoint='checkpoints/dinov2_small.pth'),
    ),
    # A simple feature pyramid: maps of 7, 14 and 28 pixels, since crowns have 40.
    neck=dict(
        type='mmseg.MultiLevelNeck',
        in_channels=[384],
        out_channels=128,
        scales=[2, 1, 0.5],
        norm_cfg=norm_cfg,
        act_cfg=dict(type='GELU'),
    ),
    bbox_head=dict(
        type='ATSSHead',
        num_classes=1,
        in_channels=128,
        feat_channels=128,
        stacked_convs=2,
        norm_cfg=norm_cfg,
        anchor_generator=dict(
            type='AnchorGenerator',
            center_offset=0.5,  # a patch's token is of its centre
            ratios=[1.0],
            octave_base_scale=4,
            scales_per_octave=1,
            strides=[7, 14, 28],
        ),
        bbox_coder=dict(type='DeltaXYWHBBoxCoder', target_stds=[0.1, 0.1, 0.2, 0.2]),
        loss_cls=dict(type='FocalLoss', use_sigmoid=True),
        loss_bbox=dict(type='GIoULoss', loss_weight=2.0),
        loss_centerness=dict(type='CrossEntropyLoss', use_sigmoid=True),
    ),
    train_cfg=dict(assigner=dict(type='ATSSAssigner', topk=9), allowed_border=-1, pos_weight=-1),
    test_cfg=dict(
        nms_pre=1000,
        min_bbox_size=0,
        score_thr=0.05,
        nms=dict(type='nms', iou_threshold=0.6),
        max_per_img=100,
    ),
)

data_root = 'data/trees/'
dataset = dict(data_root=data_root, metainfo=dict(classes=('tree',)))
# With the turned squares of the data set, flips give all eight orientations.
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='RandomResize', scale=(400, 400), ratio_range=(0.75, 1.25), keep_ratio=True),
    dict(type='RandomCrop', crop_size=(280, 280)),
    dict(type='FilterAnnotations', min_gt_bbox_wh=(8, 8)),
    dict(type='RandomFlip', prob=0.75, direction=['horizontal', 'vertical', 'diagonal']),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale_factor=1.0, keep_ratio=True),  # an image keeps its size
    dict(type='LoadAnnotations', with_bbox=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
    ),
]
train_dataloader = dict(
    batch_size=2,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(pipeline=train_pipeline, **dataset),
)
val_dataloader = dict(
    num_workers=0, persistent_workers=False, dataset=dict(pipeline=test_pipeline, **dataset)
)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val2017.json')
test_evaluator = val_evaluator

max_iters = 500
train_cfg = dict(
    _delete_=True, type='IterBasedTrainLoop', max_iters=max_iters, val_interval=max_iters
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', by_epoch=False, begin=0, end=max_iters),
]
optim_wrapper = dict(
    optimizer=dict(lr=1e-3),
    paramwise_cfg=dict(custom_keys=dict(backbone=dict(lr_mult=0.03))),
    clip_grad=dict(max_norm=10.0),
)

default_hooks = dict(
    logger=dict(interval=20), checkpoint=dict(by_epoch=False, interval=max_iters, max_keep_ckpts=1)
)
log_processor = dict(by_epoch=False)
env_cfg = dict(dist_cfg=dict(backend='gloo'))
randomness = dict(seed=0)
