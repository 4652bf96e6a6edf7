_base_ = [
    '_base_/models/poolformer_classifier.py',
    '_base_/datasets/imagenet.py',
    '_base_/schedules/imagenet_lamb.py',
    '_base_/runtime/mmpretrain.py',
]
default_hooks = dict(reparameterize=dict(type='ReparameterizeHook'))  # test the merged model

# The repeated augmentation of DeiT: an epoch is a third of the images, each
# augmented three times, for three GPUs.
train_dataloader = dict(
    batch_size=128, sampler=dict(type='RepeatAugSampler', num_repeats=3, shuffle=True)
)

optim_wrapper = dict(optimizer=dict(lr=2.5e-3, weight_decay=0.16))
param_scheduler = [
    dict(
        type='LinearLR',
        start_factor=1e-6 / 2.5e-3,  # from 1e-6
        by_epoch=True,
        begin=0,
        end=20,
        convert_to_iter_based=True,
    ),
    dict(
        type='CosineAnnealingLR',
        eta_min=6e-6,
        by_epoch=True,
        begin=20,
        end=300,
        convert_to_iter_based=True,
    ),
]
