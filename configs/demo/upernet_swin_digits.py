# UperNet with a small Swin, from scratch on the scenes of digits that
# `python tools/demo.py --task data` writes: minutes on two CPU cores.
_base_ = [
    '../_base_/models/upernet_swin.py',
    '../_base_/datasets/ade20k.py',
    '../_base_/schedules/ade20k_160k_adamw.py',
    '../_base_/runtime/mmseg.py',
]

norm_cfg = dict(type='BN', requires_grad=True)
# Nine pixels of ten are background; unweighted, it takes long to see more.
class_weight = [0.05] + 10 * [1.0]
# Where the ink is, is learned at once, and then drowns which digit it is. The
# auxiliary head is asked only that: background does not count in its loss.
digit_weight = [0.0] + 10 * [1.0]
model = dict(
    data_preprocessor=dict(size=(160, 160)),
    backbone=dict(
        arch=dict(
            _delete_=True,  # the base has a name here
            embed_dims=48,
            depths=[2, 2, 4, 2],
            num_heads=[3, 6, 12, 24],
        ),
        window_size=5,  # 160 pixels: maps of 40, 20, 10 and 5
        drop_path_rate=0.0,
    ),
    decode_head=dict(
        in_channels=[48, 96, 192, 384],
        channels=64,
        num_classes=11,
        norm_cfg=norm_cfg,
        loss_decode=dict(class_weight=class_weight),
    ),
    auxiliary_head=dict(
        in_channels=192,
        channels=128,
        num_convs=2,
        num_classes=11,
        norm_cfg=norm_cfg,
        loss_decode=dict(class_weight=digit_weight, loss_weight=1.0),
    ),
)

data_root = 'data/demo/ade'
digits = ['zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine']
# ADE20KDataset accepts ADE20K's classes only.
dataset = dict(
    type='BaseSegDataset',
    data_root=data_root,
    reduce_zero_label=True,
    img_suffix='.jpg',
    seg_map_suffix='.png',
    metainfo=dict(
        classes=['background', *digits],
        palette=[
            [0, 0, 0], [230, 25, 75], [60, 180, 75], [255, 225, 25], [0, 130, 200], [245, 130, 48],
            [145, 30, 180], [70, 240, 240], [240, 50, 230], [210, 245, 60], [250, 190, 212],
        ],
    ),
)  # fmt: skip

# No flips: a mirrored digit is not a digit.
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='Resize', scale=(160, 160), keep_ratio=True),
    dict(type='PackSegInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(160, 160), keep_ratio=True),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='PackSegInputs'),
]

train_dataloader = dict(
    batch_size=8,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(pipeline=train_pipeline, **dataset),
)
val_dataloader = dict(
    num_workers=0, persistent_workers=False, dataset=dict(pipeline=test_pipeline, **dataset)
)
test_dataloader = val_dataloader

max_iters = 1100
train_cfg = dict(max_iters=max_iters, val_interval=max_iters)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', by_epoch=False, begin=0, end=max_iters),
]
optim_wrapper = dict(optimizer=dict(lr=1e-3, weight_decay=0.05))

default_hooks = dict(
    logger=dict(interval=30), checkpoint=dict(interval=max_iters, max_keep_ckpts=1)
)
env_cfg = dict(cudnn_benchmark=False, dist_cfg=dict(backend='gloo'))
randomness = dict(seed=0)
