# ADE20K, with the batch size of MMSegmentation's Swins: 8 GPUs x 2 images.
_base_ = __import__('repa_mm').config_path('mmseg::_base_/datasets/ade20k.py')

train_dataloader = dict(batch_size=2)
