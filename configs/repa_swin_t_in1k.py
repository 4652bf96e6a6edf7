_base_ = [
    '_base_/models/swin_classifier.py',
    '_base_/datasets/imagenet.py',
    '_base_/schedules/imagenet_lamb.py',
    '_base_/runtime/mmpretrain.py',
]
default_hooks = dict(reparameterize=dict(type='ReparameterizeHook'))  # test the merged model

model = dict(backbone=dict(type='RePaSwinTransformer', idle_ratio=0.75, drop_path_rate=0.10))

# The repeated augmentation of DeiT: an epoch is a third of the images, each
# augmented three times, for three GPUs.
train_dataloader = dict(
    batch_size=128, sampler=dict(type='RepeatAugSampler', num_repeats=3, shuffle=True)
)
