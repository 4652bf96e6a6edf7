# Mask R-CNN with a small Swin, from scratch on the scenes of digits that
# `python tools/demo.py --task data` writes: minutes on two CPU cores.
_base_ = [
    '../_base_/models/mask_rcnn_swin.py',
    '../_base_/datasets/digits_instance.py',
    '../_base_/schedules/coco_1x_adamw.py',
    '../_base_/runtime/mmdet.py',
]

# Training from scratch is slow without norms in neck and heads.
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
    neck=dict(in_channels=[48, 96, 192, 384], out_channels=96, norm_cfg=norm_cfg),
    # Digits are 20 to 60 pixels tall: anchors of half the usual size.
    rpn_head=dict(in_channels=96, feat_channels=96, anchor_generator=dict(scales=[4])),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=96),
        bbox_head=dict(in_channels=96, fc_out_channels=256, num_classes=10),
        mask_roi_extractor=dict(out_channels=96),
        mask_head=dict(
            num_convs=2, in_channels=96, conv_out_channels=64, num_classes=10, norm_cfg=norm_cfg
        ),
    ),
    train_cfg=dict(
        rpn_proposal=dict(nms_pre=500, max_per_img=200), rcnn=dict(sampler=dict(num=32))
    ),
    test_cfg=dict(rpn=dict(nms_pre=500, max_per_img=100)),
)

max_epochs = 4
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
