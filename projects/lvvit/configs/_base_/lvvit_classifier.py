# RePa-LV-ViT-S classifier: it mixes tokens instead of images.
model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(
        num_classes=1000, mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], to_rgb=True
    ),
    backbone=dict(
        type='RePaLVViT',
        arch='s',
        idle_ratio=2 / 3,  # with FFNs three times as wide as the tokens
        drop_path_rate=0.10,
        mix_token=True,
        out_type='token_label',
    ),
    head=dict(type='TokenLabelHead', num_classes=1000, in_channels=384, label_smooth_val=0.1),
    init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02, bias=0.0),
)
