# Swin-B whose LayerNorms become BatchNorms while it trains, and merge: SLAB,
# https://arxiv.org/abs/2405.11582. Its schedule of lambda, 300,000 of the 375,000 iterations of 300
# epochs in batches of 1024; the rest of the recipe is Swin's.
_base_ = '../../../configs/swin_b_in1k.py'
custom_imports = dict(imports=['repa_mm', 'projects.slab'], allow_failed_imports=False)

model = dict(backbone=dict(type='ProgressiveSwinTransformer'))
custom_hooks = [dict(type='ScheduleHook', warmup=0.8)]
default_hooks = dict(reparameterize=dict(type='ReparameterizeHook'))  # test the merged model
