# Cascade Mask R-CNN with a small Swin, on the scenes of digits that
# `python tools/demo.py --task data` writes.
_base_ = 'mask_rcnn_swin_digits.py'

# The three stages of mmdet::_base_/models/cascade-mask-rcnn_r50_fpn.py.
ious = [0.5, 0.6, 0.7]
stds = [[0.1, 0.1, 0.2, 0.2], [0.05, 0.05, 0.1, 0.1], [0.033, 0.033, 0.067, 0.067]]
model = dict(
    type='CascadeRCNN',
    roi_head=dict(
        type='CascadeRoIHead',
        num_stages=3,
        stage_loss_weights=[1, 0.5, 0.25],
        bbox_head=[
            dict(
                type='Shared2FCBBoxHead',
                in_channels=96,
                fc_out_channels=256,
                num_classes=10,
                reg_class_agnostic=True,
                bbox_coder=dict(type='DeltaXYWHBBoxCoder', target_stds=std),
            )
            for std in stds
        ],
    ),
    train_cfg=dict(
        rcnn=[
            dict(
                assigner=dict(
                    type='MaxIoUAssigner',
                    pos_iou_thr=iou,
                    neg_iou_thr=iou,
                    min_pos_iou=iou,
                    match_low_quality=False,
                ),
                sampler=dict(type='RandomSampler', num=32, pos_fraction=0.25),
                mask_size=28,
                pos_weight=-1,
                debug=False,
            )
            for iou in ious
        ]
    ),
)
