_base_ = 'upernet_swin_t.py'

pretrained = 'checkpoints/swin_base_in1k.pth'
model = dict(
    backbone=dict(arch='base', init_cfg=dict(checkpoint=pretrained)),
    decode_head=dict(in_channels=[128, 256, 512, 1024]),
    auxiliary_head=dict(in_channels=512),
)
