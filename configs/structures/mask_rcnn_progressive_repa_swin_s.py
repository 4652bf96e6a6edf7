# Progressive norms before the attention, and channel-idle FFNs.
_base_ = '../mask_rcnn_repa_swin_s.py'

pretrained = 'checkpoints/progressive_repa_swin_small_in1k.pth'
model = dict(
    backbone=dict(
        type='ProgressiveSwinTransformer', idle_ratio=0.75, init_cfg=dict(checkpoint=pretrained)
    )
)
custom_hooks = [
    # The LayerNorms have faded in pretraining.
    dict(type='ScheduleHook', warmup=0),
    dict(type='ReparameterizeHook'),
]
