# RePa-MLP-Mixer-b16 classifier, with the batch augmentation and losses of
# DeiT. As in RePaFormer's released models, the norm of the token mixing is over
# the tokens, and the epsilons differ.
model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(
        num_classes=1000, mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], to_rgb=True
    ),
    backbone=dict(
        type='RePaMlpMixer',
        arch='base',
        idle_ratio=0.75,
        drop_path_rate=0.04,
        token_norm=True,
        norm_cfg=dict(type='LN', eps=1e-6),
        layer_cfgs=dict(norm_cfg=dict(type='LN', eps=1e-5)),
    ),
    neck=dict(type='GlobalAveragePooling', dim=1),
    head=dict(
        type='LinearClsHead',
        num_classes=1000,
        in_channels=768,
        init_cfg=None,  # that of the whole model, below, covers it
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        cal_acc=False,
    ),
    init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02, bias=0.0),
    train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]),
)
