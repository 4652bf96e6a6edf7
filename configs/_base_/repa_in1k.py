# What RePaFormers on ImageNet-1k share.
_base_ = ['datasets/imagenet.py', 'schedules/imagenet_lamb.py', 'runtime/mmpretrain.py']
default_hooks = dict(reparameterize=dict(type='ReparameterizeHook'))  # test the merged model

# The repeated augmentation of DeiT: an epoch is a third of the images, each augmented three times,
# for three GPUs.
train_dataloader = dict(
    batch_size=128, sampler=dict(type='RepeatAugSampler', num_repeats=3, shuffle=True)
)
