# 3 blocks with 4 branches each, deployed as 3 layers.
_base_ = 'parallel_vit_t_6_in1k.py'

pretrained = 'checkpoints/parallel_vit_t_3_mae.pth'
model = dict(backbone=dict(num_branches=4, init_cfg=dict(checkpoint=pretrained)))
