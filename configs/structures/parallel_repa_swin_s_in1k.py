# Depth and width: Swin-S with branches, and channel-idle FFNs in all blocks, with the recipe of
# RePa-Swin-S.
_base_ = '../repa_swin_s_in1k.py'

model = dict(backbone=dict(type='ParallelSwinTransformer', num_branches=3, idle_ratio=0.75))
custom_hooks = [dict(type='ScheduleHook', warmup=10000), dict(type='ReparameterizeHook')]
