_base_ = [
    '_base_/models/upernet_swin.py',
    '_base_/datasets/ade20k.py',
    '_base_/schedules/ade20k_160k_adamw.py',
    '_base_/runtime/mmseg.py',
]

pretrained = 'checkpoints/swin_tiny_in1k.pth'
model = dict(
    backbone=dict(init_cfg=dict(type='Pretrained', checkpoint=pretrained, prefix='backbone.'))
)
