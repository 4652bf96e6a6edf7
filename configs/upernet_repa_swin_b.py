_base_ = 'upernet_swin_b.py'
default_hooks = dict(reparameterize=dict(type='ReparameterizeHook'))  # test the merged model

pretrained = 'checkpoints/repa_swin_base_in1k.pth'
model = dict(
    backbone=dict(
        type='RePaSwinTransformer',
        idle_ratio=0.75,
        norm_eval=True,  # see upernet_repa_swin_t.py
        init_cfg=dict(checkpoint=pretrained),
    ),
    # UPerHead with fewer multiplications, the same to rounding
    decode_head=dict(type='FastUPerHead'),
)
