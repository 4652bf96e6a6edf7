# Progressive norms before the attention, and channel-idle FFNs: merged, no block has a norm. The recipe
# of RePa-Swin-T: 94,000 iterations in batches of 4096.
_base_ = '../repa_swin_t_in1k.py'

model = dict(backbone=dict(type='ProgressiveSwinTransformer', idle_ratio=0.75))
custom_hooks = [dict(type='ScheduleHook', warmup=0.8), dict(type='ReparameterizeHook')]
