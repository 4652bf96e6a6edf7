# RetinaNet with a small Swin, from scratch on the scenes of digits that
# `python tools/demo.py --task data` writes: minutes on two CPU cores.
_base_ = [
    '../_base_/models/retinanet_swin.py',
    '../_base_/datasets/digits_detection.py',
    '../_base_/schedules/coco_1x_adamw.py',
    '../_base_/runtime/mmdet.py',
]

# Training from scratch is slow without norms in neck and head.
norm_cfg = dict(type='GN', num_groups=16)
model = dict(
    backbone=dict(
        arch=dict(
            _delete_=True,  # the base has a name here
            embed_dims=48,
            depths=[2, 2, 4, 2],
            num_heads=[3, 6, 12, 24],
        ),
        window_size=5,  # 160 pixels: maps of 40, 20, 10 and 5
        drop_path_rate=0.0,
    ),
    neck=dict(in_channels=[96, 192, 384], out_channels=128, num_outs=3, norm_cfg=norm_cfg),
    bbox_head=dict(
        num_classes=10,
        in_channels=128,
        feat_channels=128,
        stacked_convs=2,
        norm_cfg=norm_cfg,
        # Digits are 20 to 60 pixels tall, and narrow.
        anchor_generator=dict(octave_base_scale=3, strides=[8, 16, 32]),
    ),
)

max_epochs = 3
train_cfg = dict(max_epochs=max_epochs, val_interval=max_epochs)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(
        type='CosineAnnealingLR', by_epoch=True, begin=0, end=max_epochs, convert_to_iter_based=True
    ),
]
optim_wrapper = dict(optimizer=dict(lr=1e-3))

default_hooks = dict(logger=dict(interval=30), checkpoint=dict(max_keep_ckpts=1))
env_cfg = dict(dist_cfg=dict(backend='gloo'))
randomness = dict(seed=0)
