# Depth and width: 6 blocks of 2 branches whose FFNs are channel-idle, deployed as 6 layers with
# merged FFNs. From random weights, with the recipe of RePa-DeiT-T.
_base_ = '../repa_deit_t_in1k.py'

model = dict(
    backbone=dict(
        type='ParallelVisionTransformer', arch='vit-tiny', num_branches=2, idle_ratio=0.75
    )
)
custom_hooks = [dict(type='ScheduleHook', warmup=10000), dict(type='ReparameterizeHook')]
