# Depth and width: branches in the third stage, and channel-idle FFNs in all blocks.
_base_ = '../mask_rcnn_repa_swin_s.py'

pretrained = 'checkpoints/parallel_repa_swin_small_in1k.pth'
model = dict(
    backbone=dict(
        type='ParallelSwinTransformer',
        num_branches=3,
        idle_ratio=0.75,
        init_cfg=dict(checkpoint=pretrained),
    )
)
custom_hooks = [
    # The branches are joined since pretraining.
    dict(type='ScheduleHook', warmup=0),
    dict(type='ReparameterizeHook'),
]
