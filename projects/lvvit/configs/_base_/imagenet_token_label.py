# ImageNet-1k with label maps for the training images: for `train/X/X_1.JPEG`
# the file `X/X_1.pt` in `label_root`. Maps made by an NFNet-F6 are linked on
# https://github.com/zihangJiang/TokenLabeling.
#
# To train without label maps, so that every patch learns the image's label:
#
#     --cfg-options train_dataloader.dataset.pipeline.1.label_root=None
_base_ = '../../../../configs/_base_/datasets/imagenet.py'

label_root = 'data/label_top5_train_nfnet'

# RandAugment without the policies that move the picture: the maps would not
# move with it.
policies = [
    dict(type='AutoContrast'),
    dict(type='Equalize'),
    dict(type='Invert'),
    dict(type='Posterize', magnitude_range=(4, 0)),
    dict(type='Solarize', magnitude_range=(256, 0)),
    dict(type='SolarizeAdd', magnitude_range=(0, 110)),
    dict(type='ColorTransform', magnitude_range=(0, 0.9)),
    dict(type='Contrast', magnitude_range=(0, 0.9)),
    dict(type='Brightness', magnitude_range=(0, 0.9)),
    dict(type='Sharpness', magnitude_range=(0, 0.9)),
]
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadTokenLabels', label_root=label_root),
    dict(type='RandomResizedCropWithBox', scale=224, backend='pillow', interpolation='bicubic'),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(
        type='RandAugment',
        policies=policies,
        num_policies=2,
        total_level=10,
        magnitude_level=9,
        magnitude_std=0.5,
    ),
    dict(
        type='RandomErasing',
        erase_prob=0.25,
        mode='rand',
        min_area_ratio=0.02,
        max_area_ratio=1 / 3,
        fill_color=[103.53, 116.28, 123.675],
        fill_std=[57.375, 57.12, 58.395],
    ),
    dict(type='PackInputs', algorithm_keys=('token_labels', 'crop_box')),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
