# MMPretrain's Swin-T classifier, with the batch augmentation and losses of DeiT and Swin.
_base_ = 'mmpretrain::_base_/models/swin_transformer/tiny_224.py'

model = dict(
    data_preprocessor=dict(
        num_classes=1000, mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], to_rgb=True
    ),
    backbone=dict(type='mmpretrain.SwinTransformer'),
)
