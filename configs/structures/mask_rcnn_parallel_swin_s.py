# Swin-S with 3 branches in the third stage, deployed as Swin of 2-2-6-2 layers.
_base_ = '../mask_rcnn_swin_s.py'

pretrained = 'checkpoints/parallel_swin_small_in1k.pth'
model = dict(
    backbone=dict(
        type='ParallelSwinTransformer', num_branches=3, init_cfg=dict(checkpoint=pretrained)
    )
)
custom_hooks = [
    # The branches are joined since pretraining. To join them here, from the layers of an ordinary
    # Swin-S ('checkpoints/swin_small_in1k.pth'), give a warmup.
    dict(type='ScheduleHook', warmup=0)
]
default_hooks = dict(reparameterize=dict(type='ReparameterizeHook'))  # test the merged model
