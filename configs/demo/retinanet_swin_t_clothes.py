# RetinaNet with a Swin-T of the usual size and the demo's light head, on scenes of clothes of 320 to
# 448 pixels, which `benchmarks/objects.py` writes with `--sizes 320 384 448`.
_base_ = 'retinanet_swin_clothes.py'

resize = dict(type='BatchSyncRandomResize', random_size_range=(288, 448), interval=1)
model = dict(
    data_preprocessor=dict(batch_augments=[resize]),
    backbone=dict(arch='tiny', window_size=7),
    neck=dict(in_channels=[192, 384, 768], num_outs=4),
    bbox_head=dict(anchor_generator=dict(strides=[8, 16, 32, 64])),
)

data_root = 'data/clothes_sizes/coco/'
dataset = dict(data_root=data_root)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='Resize', scale=(384, 384), keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale_factor=1.0, keep_ratio=True),  # a scene keeps its size
    dict(type='LoadAnnotations', with_bbox=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
    ),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline, **dataset))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline, **dataset))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val2017.json')
test_evaluator = val_evaluator

max_epochs = 12
train_cfg = dict(max_epochs=max_epochs, val_interval=max_epochs)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=75),
    dict(
        type='CosineAnnealingLR', by_epoch=True, begin=0, end=max_epochs, convert_to_iter_based=True
    ),
]
optim_wrapper = dict(optimizer=dict(lr=5e-4), clip_grad=dict(max_norm=5.0))
