_base_ = 'upernet_swin_b.py'
default_hooks = dict(reparameterize=dict(type='ReparameterizeHook'))  # test the merged model

pretrained = 'checkpoints/repa_swin_base_in1k.pth'
model = dict(
    backbone=dict(
        type='RePaSwinTransformer',
        idle_ratio=0.75,
        # BatchNorm statistics stay those of pretraining, which saw batches of
        # 4096: two crops a GPU are too few scenes to estimate them from. gamma
        # and beta train. For batch statistics: norm_eval=False, and
        # ffn_norm_cfg=dict(type='SyncBN') to share them between GPUs.
        norm_eval=True,
        init_cfg=dict(checkpoint=pretrained),
    ),
    # UPerHead with fewer multiplications, the same to rounding
    decode_head=dict(type='FastUPerHead'),
)
