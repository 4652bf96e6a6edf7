_base_ = 'retinanet_swin_t.py'

pretrained = 'checkpoints/swin_small_in1k.pth'
model = dict(backbone=dict(arch='small', init_cfg=dict(checkpoint=pretrained)))
