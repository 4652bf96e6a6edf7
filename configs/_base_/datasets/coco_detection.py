# COCO 2017 detection.
#
# The data is looked for in `data/coco`; a symbolic link there is the simplest
# way to have it elsewhere. In a config of your own, with
# `_base_ = '<this repository>/configs/retinanet_repa_swin_t.py'` for example,
# name the folder in every place that was filled in from it:
#
#     data_root = '/data/coco/'
#     train_dataloader = dict(dataset=dict(data_root=data_root))
#     val_dataloader = dict(dataset=dict(data_root=data_root))
#     test_dataloader = val_dataloader
#     val_evaluator = dict(
#         ann_file=data_root + 'annotations/instances_val2017.json')
#     test_evaluator = val_evaluator
#
# For other classes, give both datasets `metainfo=dict(classes=('cat', 'dog'))`
# as well and the heads their `num_classes`.
dataset_type = 'CocoDataset'
data_root = 'data/coco/'

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='Resize', scale=(1333, 800), keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(1333, 800), keep_ratio=True),
    # After Resize, since the ground truth stays in the image's own size.
    dict(type='LoadAnnotations', with_bbox=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
    ),
]

train_dataloader = dict(
    batch_size=2,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    batch_sampler=dict(type='AspectRatioBatchSampler'),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        ann_file='annotations/instances_train2017.json',
        data_prefix=dict(img='train2017/'),
        filter_cfg=dict(filter_empty_gt=True, min_size=32),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=2,
    persistent_workers=True,
    drop_last=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        ann_file='annotations/instances_val2017.json',
        data_prefix=dict(img='val2017/'),
        test_mode=True,
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader

# Without ann_file, CocoMetric would take boxes for the objects' areas, which
# makes the AP of small, medium and large objects wrong.
val_evaluator = dict(
    type='CocoMetric', ann_file=data_root + 'annotations/instances_val2017.json', metric='bbox'
)
test_evaluator = val_evaluator
