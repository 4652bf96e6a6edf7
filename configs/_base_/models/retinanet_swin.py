# MMDetection's RetinaNet on MMPretrain's Swin-T.
_base_ = 'mmdet::_base_/models/retinanet_r50_fpn.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='mmpretrain.SwinTransformer',
        arch='tiny',
        drop_path_rate=0.2,
        pad_small_map=True,
        # Only the stages that FPN reads: the norm of another one would have parameters that no
        # loss reaches.
        out_indices=(1, 2, 3),
    ),
    neck=dict(in_channels=[192, 384, 768], start_level=0),
)
