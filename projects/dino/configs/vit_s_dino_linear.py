# A linear classifier on the frozen class tokens of the last 4 blocks of a ViT-S that DINO has
# pretrained, for 100 epochs: the linear evaluation of DINO. The backbone is the teacher of
# work_dirs/vit_s_dino, see docs/train.md.
_base_ = [
    '../../../configs/_base_/datasets/imagenet.py',
    '../../../configs/_base_/runtime/mmpretrain.py',
]
custom_imports = dict(imports=['repa_mm', 'projects.dino'], allow_failed_imports=False)

model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(
        num_classes=1000, mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], to_rgb=True
    ),
    backbone=dict(
        type='VisionTransformer',
        arch='deit-small',
        out_type='cls_token',
        out_indices=[8, 9, 10, 11],
        frozen_stages=12,
        interpolate_mode='bicubic',
        init_cfg=dict(
            type='Pretrained',
            checkpoint='work_dirs/vit_s_dino/epoch_300.pth',
            prefix='teacher.backbone.',
        ),
    ),
    neck=dict(type='ClassTokens'),
    head=dict(
        type='LinearClsHead',
        num_classes=1000,
        in_channels=4 * 384,
        init_cfg=dict(type='Normal', layer='Linear', std=0.01),
        loss=dict(type='CrossEntropyLoss'),
    ),
)

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='RandomResizedCrop', scale=224, backend='pillow'),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='PackInputs'),
]
train_dataloader = dict(batch_size=128, dataset=dict(pipeline=train_pipeline))

train_cfg = dict(by_epoch=True, max_epochs=100, val_interval=1)
val_cfg = dict()
test_cfg = dict()
optim_wrapper = dict(
    type='OptimWrapper', optimizer=dict(type='SGD', lr=4e-3, momentum=0.9, weight_decay=0.0)
)
param_scheduler = [dict(type='CosineAnnealingLR', eta_min=0.0, by_epoch=True, end=100)]

# 8 GPUs x 128 images
auto_scale_lr = dict(enable=False, base_batch_size=1024)
