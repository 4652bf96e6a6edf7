# DINO with a small Swin, from scratch on the scenes of digits that
# `python tools/demo.py --task data` writes. Its encoder has FFNs of eight times the width.
_base_ = [
    '../_base_/datasets/digits_detection.py',
    '../_base_/schedules/coco_1x_adamw.py',
    '../_base_/runtime/mmdet.py',
]

dims, levels = 256, 3  # MMDetection 3.3 takes 256 channels only, OneDL's any
ffn_cfg = dict(embed_dims=dims, feedforward_channels=8 * dims, ffn_drop=0.0)
deformable_cfg = dict(embed_dims=dims, num_levels=levels, dropout=0.0)
model = dict(
    type='DINO',
    num_queries=40,
    with_box_refine=True,
    as_two_stage=True,
    data_preprocessor=dict(
        type='DetDataPreprocessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_size_divisor=1,
    ),
    backbone=dict(
        type='mmpretrain.SwinTransformer',
        arch=dict(embed_dims=48, depths=[2, 2, 4, 2], num_heads=[3, 6, 12, 24]),
        window_size=5,  # 160 pixels: maps of 40, 20, 10 and 5
        out_indices=(1, 2, 3),
        pad_small_map=True,
    ),
    neck=dict(
        type='ChannelMapper',
        in_channels=[96, 192, 384],
        kernel_size=1,
        out_channels=dims,
        act_cfg=None,
        norm_cfg=dict(type='GN', num_groups=16),
        num_outs=levels,
    ),
    encoder=dict(num_layers=3, layer_cfg=dict(self_attn_cfg=deformable_cfg, ffn_cfg=ffn_cfg)),
    decoder=dict(
        num_layers=2,
        return_intermediate=True,
        layer_cfg=dict(
            self_attn_cfg=dict(embed_dims=dims, num_heads=8, dropout=0.0),
            cross_attn_cfg=deformable_cfg,
            ffn_cfg=ffn_cfg,
        ),
        post_norm_cfg=None,
    ),
    positional_encoding=dict(num_feats=dims // 2, normalize=True, offset=0.0, temperature=20),
    bbox_head=dict(
        type='DINOHead',
        num_classes=10,
        embed_dims=dims,
        sync_cls_avg_factor=True,
        loss_cls=dict(type='FocalLoss', use_sigmoid=True, gamma=2.0, alpha=0.25, loss_weight=1.0),
        loss_bbox=dict(type='L1Loss', loss_weight=5.0),
        loss_iou=dict(type='GIoULoss', loss_weight=2.0),
    ),
    dn_cfg=dict(
        label_noise_scale=0.5,
        box_noise_scale=1.0,
        group_cfg=dict(dynamic=True, num_groups=None, num_dn_queries=20),
    ),
    train_cfg=dict(
        assigner=dict(
            type='HungarianAssigner',
            match_costs=[
                dict(type='FocalLossCost', weight=2.0),
                dict(type='BBoxL1Cost', weight=5.0, box_format='xywh'),
                dict(type='IoUCost', iou_mode='giou', weight=2.0),
            ],
        )
    ),
    test_cfg=dict(max_per_img=40),
)

max_epochs = 8
train_cfg = dict(max_epochs=max_epochs, val_interval=2)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(
        type='CosineAnnealingLR', by_epoch=True, begin=0, end=max_epochs, convert_to_iter_based=True
    ),
]
optim_wrapper = dict(optimizer=dict(lr=4e-4), clip_grad=dict(max_norm=1.0))

default_hooks = dict(logger=dict(interval=30), checkpoint=dict(max_keep_ckpts=1))
env_cfg = dict(dist_cfg=dict(backend='gloo'))
randomness = dict(seed=0)
