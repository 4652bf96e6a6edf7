# ImageNet-1k at 224x224 for masked autoencoders: random crops and flips, no labels needed. Where the
# data is looked for: see configs/_base_/datasets/imagenet.py.
dataset_type = 'ImageNet'
data_root = 'data/imagenet'

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(
        type='RandomResizedCrop',
        scale=224,
        crop_ratio_range=(0.2, 1.0),
        backend='pillow',
        interpolation='bicubic',
    ),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackInputs'),
]

train_dataloader = dict(
    batch_size=512,
    num_workers=8,
    persistent_workers=True,
    pin_memory=True,
    drop_last=True,
    collate_fn=dict(type='default_collate'),
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(type=dataset_type, data_root=data_root, split='train', pipeline=train_pipeline),
)
# There is nothing to validate or to test.
val_dataloader = None
test_dataloader = None
