# Cascade R-CNN with a small Swin, on the scenes of digits that `python tools/demo.py --task data`
# writes; faster from the weights of retinanet_swin_digits.py (load_from).
_base_ = [
    'mmdet::_base_/models/cascade-rcnn_r50_fpn.py',
    '../_base_/datasets/digits_detection.py',
    '../_base_/schedules/coco_1x_adamw.py',
    '../_base_/runtime/mmdet.py',
]

norm_cfg = dict(type='GN', num_groups=16)
bbox_head = dict(
    type='Shared2FCBBoxHead',
    in_channels=96,
    fc_out_channels=256,
    roi_feat_size=7,
    num_classes=10,
    reg_class_agnostic=True,
    loss_cls=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
    loss_bbox=dict(type='SmoothL1Loss', beta=1.0, loss_weight=1.0),
)
bbox_coder = dict(type='DeltaXYWHBBoxCoder', target_means=[0.0] * 4)
sampler = dict(type='RandomSampler', num=32, pos_fraction=0.25)
assigner = dict(type='MaxIoUAssigner', match_low_quality=False, ignore_iof_thr=-1)
model = dict(
    data_preprocessor=dict(pad_size_divisor=1),
    backbone=dict(
        _delete_=True,
        type='mmpretrain.SwinTransformer',
        arch=dict(embed_dims=48, depths=[2, 2, 4, 2], num_heads=[3, 6, 12, 24]),
        window_size=5,  # 160 pixels: maps of 40, 20, 10 and 5
        out_indices=(0, 1, 2, 3),
        pad_small_map=True,
    ),
    neck=dict(in_channels=[48, 96, 192, 384], out_channels=96, norm_cfg=norm_cfg),
    # Digits are 20 to 60 pixels tall: anchors of half the usual size.
    rpn_head=dict(in_channels=96, feat_channels=96, anchor_generator=dict(scales=[4])),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=96),
        bbox_head=[
            dict(bbox_head, bbox_coder=dict(bbox_coder, target_stds=stds))
            for stds in ([0.1, 0.1, 0.2, 0.2], [0.05, 0.05, 0.1, 0.1], [0.033, 0.033, 0.067, 0.067])
        ],
    ),
    train_cfg=dict(
        rpn_proposal=dict(nms_pre=500, max_per_img=200),
        rcnn=[
            dict(
                assigner=dict(assigner, pos_iou_thr=iou, neg_iou_thr=iou, min_pos_iou=iou),
                sampler=sampler,
                pos_weight=-1,
                debug=False,
            )
            for iou in (0.5, 0.6, 0.7)
        ],
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
