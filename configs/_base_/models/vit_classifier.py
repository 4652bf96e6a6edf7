# RePa-DeiT-T classifier; head, losses and batch augmentation are those of the Swin. As
# RePaFormer's released models, it has a norm behind the position embedding, and a larger epsilon
# in the blocks.
_base_ = 'swin_classifier.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='RePaVisionTransformer',
        arch='deit-tiny',
        idle_ratio=0.75,
        drop_path_rate=0.02,
        pre_norm=True,
        layer_cfgs=dict(norm_cfg=dict(type='LN', eps=1e-5)),
    ),
    neck=None,
    head=dict(in_channels=192),
    init_cfg=dict(_delete_=True, type='TruncNormal', layer='Linear', std=0.02, bias=0.0),
)
