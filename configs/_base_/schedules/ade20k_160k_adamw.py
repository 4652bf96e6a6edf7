# 160k iterations on ADE20K with AdamW: MMSegmentation's UperNet with Swin. Norms of the backbone
# and relative position tables do not decay.
_base_ = __import__('repa_mm').config_path('mmseg::_base_/schedules/schedule_160k.py')

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=1500),
    dict(type='PolyLR', eta_min=0.0, power=1.0, begin=1500, end=160000, by_epoch=False),
]

# The FFNs of RePa backbones hold their norms: `ffn.norm1`, `ffn.norm2`.
optim_wrapper = dict(
    _delete_=True,
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=0.00006, betas=(0.9, 0.999), weight_decay=0.01),
    paramwise_cfg=dict(
        custom_keys={
            'absolute_pos_embed': dict(decay_mult=0.0),
            'relative_position_bias_table': dict(decay_mult=0.0),
            'norm': dict(decay_mult=0.0),
        }
    ),
)
default_hooks = dict(checkpoint=dict(max_keep_ckpts=2))

# 8 GPUs x 2 images
auto_scale_lr = dict(enable=False, base_batch_size=16)
