# RePa-PoolFormer-s12 classifier; neck, head, losses and batch augmentation are those of the Swin. As
# in RePaFormer's released models, the pooling is over 7x7 places, instead of PoolFormer's own 3x3.
_base_ = 'swin_classifier.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='RePaPoolFormer',
        arch='s12',
        idle_ratio=0.75,
        drop_path_rate=0.02,
        pool_size=7,
    ),
    head=dict(in_channels=512),
    init_cfg=dict(_delete_=True, type='TruncNormal', layer='Linear', std=0.02, bias=0.0),
)
