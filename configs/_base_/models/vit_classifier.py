# RePa-DeiT-T classifier, with the batch augmentation and losses of DeiT. As
# RePaFormer's released models, it has a norm behind the position embedding,
# and a larger epsilon in the blocks.
model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(
        num_classes=1000, mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], to_rgb=True
    ),
    backbone=dict(
        type='RePaVisionTransformer',
        arch='deit-tiny',
        idle_ratio=0.75,
        drop_path_rate=0.02,
        pre_norm=True,
        layer_cfgs=dict(norm_cfg=dict(type='LN', eps=1e-5)),
    ),
    head=dict(
        type='LinearClsHead',
        num_classes=1000,
        in_channels=192,
        init_cfg=None,  # that of the whole model, below, covers it
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        cal_acc=False,
    ),
    init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02, bias=0.0),
    train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]),
)
