# The linear evaluation of a RePa-ViT-S: the teacher of work_dirs/repa_vit_s_dino.
_base_ = 'vit_s_dino_linear.py'
default_hooks = dict(reparameterize=dict(type='ReparameterizeHook'))  # test the merged model

model = dict(
    backbone=dict(
        type='RePaVisionTransformer',
        idle_ratio=0.75,
        init_cfg=dict(checkpoint='work_dirs/repa_vit_s_dino/epoch_300.pth'),
    )
)
