# ADE20K, the 150 classes of the scene parsing challenge.
#
# The data is looked for in `data/ade/ADEChallengeData2016`; a symbolic link
# there is the simplest way to have it elsewhere. In a config of your own that
# inherits one of ours, name the folder in every place that was filled in from
# it:
#
#     data_root = '/data/ade'
#     train_dataloader = dict(dataset=dict(data_root=data_root))
#     val_dataloader = dict(dataset=dict(data_root=data_root))
#     test_dataloader = val_dataloader
#
# For other classes, use `type='BaseSegDataset'` with
# `metainfo=dict(classes=('road', 'sky'))` and the suffixes of your files, and
# give both heads their `num_classes`. ADE20KDataset accepts ADE20K's classes
# only.
dataset_type = 'ADE20KDataset'
data_root = 'data/ade/ADEChallengeData2016'
crop_size = (512, 512)

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='RandomResize', scale=(2048, 512), ratio_range=(0.5, 2.0), keep_ratio=True),
    dict(type='RandomCrop', crop_size=crop_size, cat_max_ratio=0.75),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PhotoMetricDistortion'),
    dict(type='PackSegInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(2048, 512), keep_ratio=True),
    # After Resize, since the ground truth stays in the image's own size.
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='PackSegInputs'),
]

train_dataloader = dict(
    batch_size=2,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        data_prefix=dict(img_path='images/training', seg_map_path='annotations/training'),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        data_prefix=dict(img_path='images/validation', seg_map_path='annotations/validation'),
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader

val_evaluator = dict(type='IoUMetric', iou_metrics=['mIoU'])
test_evaluator = val_evaluator
