# 4 blocks with 3 branches each, deployed as 4 layers.
_base_ = 'parallel_vit_t_6_in1k.py'

pretrained = 'checkpoints/parallel_vit_t_4_mae.pth'
model = dict(backbone=dict(num_branches=3, init_cfg=dict(checkpoint=pretrained)))
