_base_ = 'mask_rcnn_swin_t.py'

pretrained = (
    'https://download.openmmlab.com/mmclassification/v0/swin-transformer/'
    'swin_small_224_b16x64_300e_imagenet_20210615_110219-7f9d988b.pth'
)
model = dict(backbone=dict(arch='small', init_cfg=dict(checkpoint=pretrained)))
