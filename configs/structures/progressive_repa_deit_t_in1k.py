# Progressive norms before the attention, and channel-idle FFNs. The recipe of RePa-DeiT-T: 94,000
# iterations in batches of 4096.
_base_ = '../repa_deit_t_in1k.py'

model = dict(backbone=dict(type='ProgressiveVisionTransformer'))
custom_hooks = [dict(type='ScheduleHook', warmup=0.8), dict(type='ReparameterizeHook')]
