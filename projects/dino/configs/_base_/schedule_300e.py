# 300 epochs of DINO: AdamW, 5e-4 for 256 images, a weight decay that rises from 0.04 to 0.4, and a
# teacher that keeps 0.996 of itself, rising to 1.
train_cfg = dict(by_epoch=True, max_epochs=300)
val_cfg = None
test_cfg = dict()

optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.04),
    paramwise_cfg=dict(norm_decay_mult=0.0, bias_decay_mult=0.0, flat_decay_mult=0.0),
)
param_scheduler = [
    dict(
        type='LinearLR',
        start_factor=1e-6,
        by_epoch=True,
        begin=0,
        end=10,
        convert_to_iter_based=True,
    ),
    dict(
        type='CosineAnnealingLR',
        eta_min=1e-6,
        by_epoch=True,
        begin=10,
        end=300,
        convert_to_iter_based=True,
    ),
    # A ratio, so that parameters without weight decay stay without it.
    dict(
        type='CosineAnnealingParamScheduler',
        param_name='weight_decay',
        eta_min_ratio=10.0,
        by_epoch=True,
        begin=0,
        end=300,
        convert_to_iter_based=True,
    ),
]
custom_hooks = [dict(type='DINOHook', momentum=0.996, clip=3.0, freeze_last_layer=1)]

# 8 GPUs x 64 images
auto_scale_lr = dict(enable=False, base_batch_size=512)
# Where there are several GPUs, BatchNorm statistics are those of all of them.
sync_bn = 'torch'
