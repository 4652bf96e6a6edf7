# DINO with a small ViT, to be tried on a few images of 64 pixels: data/photos/train/CLASS/*.png
# and data/photos/val/CLASS/*.png.
_base_ = 'vit_s_dino.py'

data_root = 'data/photos'
# Strong: with few images, colours alone would tell them apart.
color = [
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='ColorJitter', brightness=0.6, contrast=0.6, saturation=0.6, hue=0.2, backend='cv2'),
    dict(
        type='RandomGrayscale', prob=0.2, keep_channels=True, channel_weights=(0.114, 0.587, 0.2989)
    ),
]
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(
        type='MultiView',
        num_views=[2, 4],
        transforms=[
            [dict(type='RandomResizedCrop', scale=64, crop_ratio_range=(0.4, 1.0)), *color],
            [dict(type='RandomResizedCrop', scale=32, crop_ratio_range=(0.1, 0.4)), *color],
        ],
    ),
    dict(type='PackInputs'),
]
test_pipeline = [dict(type='LoadImageFromFile'), dict(type='PackInputs')]
train_dataloader = dict(
    batch_size=32,
    num_workers=1,
    dataset=dict(
        _delete_=True,
        type='CustomDataset',
        data_root=data_root,
        data_prefix='train',
        pipeline=train_pipeline,
    ),
)
test_dataloader = dict(
    num_workers=1,
    dataset=dict(
        _delete_=True,
        type='CustomDataset',
        data_root=data_root,
        data_prefix='val',
        pipeline=test_pipeline,
    ),
)

model = dict(
    backbone=dict(
        _delete_=True,
        type='VisionTransformer',
        arch=dict(embed_dims=96, num_layers=6, num_heads=3, feedforward_channels=384),
        img_size=64,
        patch_size=16,
        out_type='cls_token',
        interpolate_mode='bicubic',
    ),
    neck=dict(in_channels=96, hidden_channels=256, bottleneck_channels=64, out_channels=1024),
    head=dict(out_channels=1024, teacher_temperature=0.04, warmup_epochs=1),
)

train_cfg = dict(max_epochs=40)
param_scheduler = [
    dict(
        type='LinearLR',
        start_factor=1e-3,
        by_epoch=True,
        begin=0,
        end=2,
        convert_to_iter_based=True,
    ),
    dict(
        type='CosineAnnealingLR',
        eta_min=1e-5,
        by_epoch=True,
        begin=2,
        end=40,
        convert_to_iter_based=True,
    ),
]
custom_hooks = [dict(type='DINOHook', momentum=0.98, clip=3.0, freeze_last_layer=1)]
default_hooks = dict(logger=dict(interval=10), checkpoint=dict(interval=10, max_keep_ckpts=-1))
