_base_ = [
    '_base_/models/retinanet_swin.py',
    'mmdet::_base_/datasets/coco_detection.py',
    '_base_/schedules/coco_1x_sgd.py',
    '_base_/runtime/mmdet.py',
]

pretrained = 'checkpoints/swin_tiny_in1k.pth'
model = dict(
    backbone=dict(init_cfg=dict(type='Pretrained', checkpoint=pretrained, prefix='backbone.'))
)
