# Swin-S with progressive norms, which have become BatchNorms in pretraining.
_base_ = '../retinanet_swin_s.py'

pretrained = 'checkpoints/progressive_swin_small_in1k.pth'
model = dict(
    backbone=dict(
        type='ProgressiveSwinTransformer',
        # BatchNorm statistics stay those of pretraining: two images a GPU are too few.
        norm_eval=True,
        init_cfg=dict(checkpoint=pretrained),
    )
)
custom_hooks = [
    # The LayerNorms have faded in pretraining. To let them fade here, from an ordinary Swin, give a
    # warmup below the 88,000 iterations, and norm_eval=False.
    dict(type='ScheduleHook', warmup=0)
]
default_hooks = dict(reparameterize=dict(type='ReparameterizeHook'))  # test the merged model
