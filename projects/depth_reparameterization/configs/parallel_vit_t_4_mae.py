# 4 blocks with 3 branches each.
_base_ = 'parallel_vit_t_6_mae.py'

model = dict(backbone=dict(num_branches=3))
