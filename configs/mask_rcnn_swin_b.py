_base_ = 'mask_rcnn_swin_t.py'

pretrained = 'checkpoints/swin_base_in1k.pth'
model = dict(
    backbone=dict(arch='base', init_cfg=dict(checkpoint=pretrained)),
    neck=dict(in_channels=[128, 256, 512, 1024]),
)
