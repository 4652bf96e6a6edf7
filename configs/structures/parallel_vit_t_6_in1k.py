# A ViT-T of 6 blocks with 2 branches each (12 layers), deployed as 6 ordinary layers: the second step
# of https://arxiv.org/abs/2511.19718, from the masked autoencoder of parallel_vit_t_6_mae.py. The
# schedule of lambda is the paper's, the rest of the recipe is MMPretrain's for MAE.
_base_ = ['../_base_/datasets/imagenet.py', '../_base_/runtime/mmpretrain.py']

# An ordinary ViT-T of 12 layers can be given, too: its layers fill the branches.
pretrained = 'checkpoints/parallel_vit_t_6_mae.pth'
model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(
        num_classes=1000, mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], to_rgb=True
    ),
    backbone=dict(
        type='ParallelVisionTransformer',
        arch='vit-tiny',
        num_branches=2,
        out_type='avg_featmap',
        final_norm=False,
        init_cfg=dict(type='Pretrained', checkpoint=pretrained, prefix='backbone.'),
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

# 8 GPUs x 128 images, 1251 iterations an epoch: the branches are joined in the first 8 epochs.
train_dataloader = dict(batch_size=128)
auto_scale_lr = dict(enable=False, base_batch_size=1024)
custom_hooks = [dict(type='ScheduleHook', warmup=10000), dict(type='ReparameterizeHook')]

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
        # MMPretrain's for 12 layers, here for 6 blocks
        layer_decay_rate=0.75,
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
        custom_keys={'.cls_token': dict(decay_mult=0.0), '.pos_embed': dict(decay_mult=0.0)},
    ),
)
