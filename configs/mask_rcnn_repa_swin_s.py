_base_ = 'mask_rcnn_swin_s.py'
default_hooks = dict(reparameterize=dict(type='ReparameterizeHook'))  # test the merged model

pretrained = 'checkpoints/repa_swin_small_in1k.pth'
model = dict(
    backbone=dict(
        type='RePaSwinTransformer',
        idle_ratio=0.75,
        norm_eval=True,  # see mask_rcnn_repa_swin_t.py
        init_cfg=dict(checkpoint=pretrained),
    )
)
