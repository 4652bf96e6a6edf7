# Progressive norms before the attention, and channel-idle FFNs whose idle channels begin with an
# activation. The recipe of RePa-DeiT-T: 94,000 iterations in batches of 4096.
_base_ = '../repa_deit_t_in1k.py'

model = dict(backbone=dict(type='ProgressiveVisionTransformer', progressive_activations=True))
custom_hooks = [
    dict(type='DecayLayerNormsHook', warmup=0.8),
    dict(type='DecayActivationsHook', warmup=0.8),
    dict(type='ReparameterizeHook'),
]
