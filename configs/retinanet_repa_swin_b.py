_base_ = 'retinanet_swin_b.py'
default_hooks = dict(reparameterize=dict(type='ReparameterizeHook'))  # test the merged model

pretrained = 'checkpoints/repa_swin_base_in1k.pth'
model = dict(
    backbone=dict(
        type='RePaSwinTransformer',
        idle_ratio=0.75,
        norm_eval=True,  # see retinanet_repa_swin_t.py
        init_cfg=dict(checkpoint=pretrained),
    )
)
