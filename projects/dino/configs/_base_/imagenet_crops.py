# ImageNet-1k for DINO: 2 global crops of 224x224 and 8 local ones of 96x96, as in its authors' code.
# Labels are not used. Where the data is looked for: see imagenet.py. The test images are those of
# projects/dino/knn.py.
_base_ = '../../../../configs/_base_/datasets/imagenet.py'

color = [
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(
        type='RandomApply',
        transforms=[
            dict(type='ColorJitter', brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1)
        ],
        prob=0.8,
    ),
    dict(
        type='RandomGrayscale', prob=0.2, keep_channels=True, channel_weights=(0.114, 0.587, 0.2989)
    ),
]
global_crop = dict(
    type='RandomResizedCrop',
    scale=224,
    crop_ratio_range=(0.4, 1.0),
    backend='pillow',
    interpolation='bicubic',
)
local_crop = dict(
    type='RandomResizedCrop',
    scale=96,
    crop_ratio_range=(0.05, 0.4),
    backend='pillow',
    interpolation='bicubic',
)
blur = dict(type='GaussianBlur', magnitude_range=(0.1, 2.0), magnitude_std='inf', prob=1.0)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(
        type='MultiView',
        num_views=[1, 1, 8],
        transforms=[
            [global_crop, *color, blur],
            [global_crop, *color, dict(blur, prob=0.1), dict(type='Solarize', thr=128, prob=0.2)],
            [local_crop, *color, dict(blur, prob=0.5)],
        ],
    ),
    dict(type='PackInputs'),
]
train_dataloader = dict(
    batch_size=64,
    num_workers=10,
    dataset=dict(
        _delete_=True,
        type='ImageNet',
        data_root='data/imagenet',
        split='train',
        pipeline=train_pipeline,
    ),
)
# Nothing is validated while DINO trains.
val_dataloader = None
val_evaluator = None
