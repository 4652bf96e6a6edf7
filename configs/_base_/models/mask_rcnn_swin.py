# MMDetection's Mask R-CNN on MMPretrain's Swin-T.
_base_ = 'mmdet::_base_/models/mask-rcnn_r50_fpn.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='mmpretrain.SwinTransformer',
        arch='tiny',
        drop_path_rate=0.2,
        pad_small_map=True,
        out_indices=(0, 1, 2, 3),
    ),
    neck=dict(in_channels=[96, 192, 384, 768]),
)
