# A small SegFormer, from scratch on the scenes of digits that `python tools/demo.py --task data`
# writes.
_base_ = 'upernet_swin_digits.py'

norm_cfg = dict(type='BN', requires_grad=True)
model = dict(
    backbone=dict(
        _delete_=True,
        type='MixVisionTransformer',
        embed_dims=32,
        num_layers=[1, 1, 2, 1],
        num_heads=[1, 2, 4, 8],
        drop_path_rate=0.0,
    ),
    decode_head=dict(
        _delete_=True,
        type='SegformerHead',
        in_channels=[32, 64, 128, 256],
        in_index=[0, 1, 2, 3],
        channels=64,
        num_classes=11,
        norm_cfg=norm_cfg,
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', class_weight={{_base_.class_weight}}),
    ),
    auxiliary_head=dict(in_channels=128),
)
