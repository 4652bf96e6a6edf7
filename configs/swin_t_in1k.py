_base_ = [
    '_base_/models/swin_classifier.py',
    '_base_/datasets/imagenet.py',
    '_base_/schedules/imagenet_adamw.py',
    '_base_/runtime/mmpretrain.py',
]
