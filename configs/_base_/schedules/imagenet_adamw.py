# 300 epochs on ImageNet-1k with AdamW: the recipe of Swin, for 16 GPUs x 64 images. Norms, biases
# and relative position tables do not decay.
_base_ = 'mmpretrain::_base_/schedules/imagenet_bs1024_adamw_swin.py'

optim_wrapper = dict(type='OptimWrapper', clip_grad=dict(max_norm=5.0))
auto_scale_lr = dict(enable=False)
