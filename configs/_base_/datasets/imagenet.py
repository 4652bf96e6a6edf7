# ImageNet-1k at 224x224 with the image augmentation of DeiT, which is that of Swin, too.
_base_ = 'mmpretrain::_base_/datasets/imagenet_bs64_swin_224.py'

data_preprocessor = None  # the model has it
# MMPretrain's own tools set these. Here they stand for all tools.
dataloader = dict(persistent_workers=True, pin_memory=True, collate_fn=dict(type='default_collate'))
train_dataloader = dict(drop_last=True, **dataloader)
val_dataloader = dataloader
test_dataloader = dataloader
