# RePa-PoolFormer-s12 classifier, with the batch augmentation and losses of
# DeiT. As in RePaFormer's released models, the pooling is over 7x7 places,
# instead of PoolFormer's own 3x3.
model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(
        num_classes=1000, mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], to_rgb=True
    ),
    backbone=dict(
        type='RePaPoolFormer', arch='s12', idle_ratio=0.75, drop_path_rate=0.02, pool_size=7
    ),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(
        type='LinearClsHead',
        num_classes=1000,
        in_channels=512,
        init_cfg=None,  # that of the whole model, below, covers it
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        cal_acc=False,
    ),
    init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02, bias=0.0),
    train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]),
)
