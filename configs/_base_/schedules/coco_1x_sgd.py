# 12 epochs on COCO with SGD: MMDetection's RetinaNet with Swin. Norms and relative position tables
# do not decay.
_base_ = 'mmdet::_base_/schedules/schedule_1x.py'

# The FFNs of RePa backbones hold their norms: `ffn.norm1`, `ffn.norm2`.
optim_wrapper = dict(
    optimizer=dict(lr=0.01),
    paramwise_cfg=dict(
        custom_keys={
            'absolute_pos_embed': dict(decay_mult=0.0),
            'relative_position_bias_table': dict(decay_mult=0.0),
            'norm': dict(decay_mult=0.0),
        }
    ),
)
