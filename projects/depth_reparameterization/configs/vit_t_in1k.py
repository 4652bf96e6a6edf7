# An ordinary ViT-T of 12 layers, to compare parallel_vit_t_{6,4,3}_in1k.py with. The recipe is
# MMPretrain's for MAE.
_base_ = [
    '../../../configs/_base_/datasets/imagenet.py',
    '../../../configs/_base_/runtime/mmpretrain.py',
]

model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(
        num_classes=1000, mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], to_rgb=True
    ),
    backbone=dict(
        type='mmpretrain.VisionTransformer',
        arch='deit-tiny',
        out_type='avg_featmap',
        final_norm=False,
    ),
    head=dict(
        type='LinearClsHead',
        num_classes=1000,
        in_channels=192,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        cal_acc=False,
        init_cfg=[dict(type='TruncNormal', layer='Linear', std=2e-5)],
    ),
    train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]),
)

# 8 GPUs x 128 images
train_dataloader = dict(batch_size=128)
auto_scale_lr = dict(enable=False, base_batch_size=1024)

train_cfg = dict(by_epoch=True, max_epochs=100, val_interval=1)
val_cfg = dict()
test_cfg = dict()
param_scheduler = [
    dict(
        type='LinearLR',
        start_factor=1e-4,
        by_epoch=True,
        begin=0,
        end=5,
        convert_to_iter_based=True,
    ),
    dict(
        type='CosineAnnealingLR',
        T_max=95,
        by_epoch=True,
        begin=5,
        end=100,
        eta_min=1e-6,
        convert_to_iter_based=True,
    ),
]
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=2e-3, weight_decay=0.05, betas=(0.9, 0.999)),
    constructor='LearningRateDecayOptimWrapperConstructor',
    paramwise_cfg=dict(
        layer_decay_rate=0.75,
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
        custom_keys={'.cls_token': dict(decay_mult=0.0), '.pos_embed': dict(decay_mult=0.0)},
    ),
)
