# 300 epochs on ImageNet-1k with LAMB: the recipe of RePaFormer (table 7), with
# the numbers of RePa-Swin-T. Norms, biases, class tokens, position embeddings
# and relative position tables do not decay. LAMB clips the gradient to norm 1
# by itself.
train_cfg = dict(by_epoch=True, max_epochs=300, val_interval=1)
val_cfg = dict()
test_cfg = dict()

param_scheduler = [
    dict(
        type='LinearLR',
        start_factor=1e-6 / 5e-3,  # from 1e-6
        by_epoch=True,
        begin=0,
        end=20,
        convert_to_iter_based=True,
    ),
    dict(
        type='CosineAnnealingLR',
        eta_min=5e-5,
        by_epoch=True,
        begin=20,
        end=300,
        convert_to_iter_based=True,
    ),
]

optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='Lamb', lr=5e-3, weight_decay=0.20, eps=1e-8),
    paramwise_cfg=dict(
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
        flat_decay_mult=0.0,
        custom_keys={
            '.absolute_pos_embed': dict(decay_mult=0.0),
            '.cls_token': dict(decay_mult=0.0),
            '.pos_embed': dict(decay_mult=0.0),
            '.relative_position_bias_table': dict(decay_mult=0.0),
        },
    ),
)

# 32 GPUs x 128 images. With fewer, either gather the gradients of several
# batches (with 8 GPUs, `--cfg-options optim_wrapper.accumulative_counts=4`), or
# scale the learning rate (`--auto-scale-lr`).
auto_scale_lr = dict(enable=False, base_batch_size=4096)
