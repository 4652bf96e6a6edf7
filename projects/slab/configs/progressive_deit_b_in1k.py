# A DeiT-B whose LayerNorms become BatchNorms while it trains, and merge: SLAB,
# https://arxiv.org/abs/2405.11582. Its schedule of lambda, 300,000 of the 375,000 iterations of 300
# epochs in batches of 1024, and its learning rate; the rest of the recipe is that of RePa-DeiT-B.
_base_ = '../../../configs/repa_deit_b_in1k.py'
custom_imports = dict(imports=['repa_mm', 'projects.slab'], allow_failed_imports=False)

model = dict(
    backbone=dict(
        _delete_=True,
        type='ProgressiveVisionTransformer',
        arch='deit-base',
        drop_path_rate=0.10,
        pre_norm=True,
        layer_cfgs=dict(norm_cfg=dict(type='LN', eps=1e-5)),
    )
)
optim_wrapper = dict(optimizer=dict(type='AdamW', lr=5e-4, weight_decay=0.05))
auto_scale_lr = dict(enable=False, base_batch_size=1024)
custom_hooks = [dict(type='ScheduleHook', warmup=0.8)]
