_base_ = [
    '_base_/models/retinanet_swin.py',
    'mmdet::_base_/datasets/coco_detection.py',
    '_base_/schedules/coco_1x_sgd.py',
    '_base_/runtime/mmdet.py',
]

pretrained = (
    'https://download.openmmlab.com/mmclassification/v0/swin-transformer/'
    'swin_tiny_224_b16x64_300e_imagenet_20210616_090925-66df6be6.pth'
)
model = dict(
    backbone=dict(init_cfg=dict(type='Pretrained', checkpoint=pretrained, prefix='backbone.'))
)
