_base_ = [
    '_base_/models/upernet_swin.py',
    '_base_/datasets/ade20k.py',
    '_base_/schedules/ade20k_160k_adamw.py',
    '_base_/runtime/mmseg.py',
]

pretrained = (
    'https://download.openmmlab.com/mmclassification/v0/swin-transformer/'
    'swin_tiny_224_b16x64_300e_imagenet_20210616_090925-66df6be6.pth'
)
model = dict(
    backbone=dict(init_cfg=dict(type='Pretrained', checkpoint=pretrained, prefix='backbone.'))
)
