# ImageNet-1k at 224x224 with the image augmentation of DeiT, which is that of
# Swin too: RandAugment rand-m9-mstd0.5-inc1 and random erasing.
#
# The data is looked for in `data/imagenet`, with the folders `train` and
# `val`; a symbolic link there is the simplest way to have it elsewhere. In a
# config of your own that inherits one of ours, name the folder in every place
# that was filled in from it:
#
#     data_root = '/data/imagenet'
#     train_dataloader = dict(dataset=dict(data_root=data_root))
#     val_dataloader = dict(dataset=dict(data_root=data_root))
#     test_dataloader = val_dataloader
#
# For other classes, use `type='CustomDataset'` with one folder a class, and
# change `num_classes` of the model's head and of its data_preprocessor.
dataset_type = 'ImageNet'
data_root = 'data/imagenet'

# The pipeline sees BGR images.
bgr_mean = [103.53, 116.28, 123.675]
bgr_std = [57.375, 57.12, 58.395]

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='RandomResizedCrop', scale=224, backend='pillow', interpolation='bicubic'),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(
        type='RandAugment',
        policies='timm_increasing',
        num_policies=2,
        total_level=10,
        magnitude_level=9,
        magnitude_std=0.5,
        hparams=dict(pad_val=[round(x) for x in bgr_mean], interpolation='bicubic'),
    ),
    dict(
        type='RandomErasing',
        erase_prob=0.25,
        mode='rand',
        min_area_ratio=0.02,
        max_area_ratio=1 / 3,
        fill_color=bgr_mean,
        fill_std=bgr_std,
    ),
    dict(type='PackInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='ResizeEdge', scale=256, edge='short', backend='pillow', interpolation='bicubic'),
    dict(type='CenterCrop', crop_size=224),
    dict(type='PackInputs'),
]

train_dataloader = dict(
    batch_size=64,
    num_workers=5,
    persistent_workers=True,
    pin_memory=True,
    drop_last=True,
    collate_fn=dict(type='default_collate'),
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(type=dataset_type, data_root=data_root, split='train', pipeline=train_pipeline),
)
val_dataloader = dict(
    batch_size=64,
    num_workers=5,
    persistent_workers=True,
    pin_memory=True,
    collate_fn=dict(type='default_collate'),
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type=dataset_type, data_root=data_root, split='val', pipeline=test_pipeline),
)
test_dataloader = val_dataloader

val_evaluator = dict(type='Accuracy', topk=(1, 5))
test_evaluator = val_evaluator
