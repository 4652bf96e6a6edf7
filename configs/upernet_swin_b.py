_base_ = 'upernet_swin_t.py'

pretrained = (
    'https://download.openmmlab.com/mmclassification/v0/swin-transformer/'
    'swin_base_224_b16x64_300e_imagenet_20210616_190742-93230b0d.pth'
)
model = dict(
    backbone=dict(arch='base', init_cfg=dict(checkpoint=pretrained)),
    decode_head=dict(in_channels=[128, 256, 512, 1024]),
    auxiliary_head=dict(in_channels=512),
)
