# A ViT-T of 6 blocks with 2 branches each (12 layers), pretrained as a masked autoencoder: the first
# step of https://arxiv.org/abs/2511.19718. The branches stay apart (lambda = 0);
# parallel_vit_t_6_in1k.py joins them while it fine-tunes. The recipe is that of MAE in MMPretrain.
_base_ = ['_base_/imagenet_mae.py', '../../../configs/_base_/runtime/mmpretrain.py']
custom_imports = dict(
    imports=['repa_mm', 'projects.depth_reparameterization'], allow_failed_imports=False
)

model = dict(
    type='MAE',
    data_preprocessor=dict(
        type='SelfSupDataPreprocessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        to_rgb=True,
    ),
    backbone=dict(
        type='ParallelMAEViT', arch='vit-tiny', num_branches=2, patch_size=16, mask_ratio=0.75
    ),
    neck=dict(
        type='MAEPretrainDecoder',
        patch_size=16,
        in_chans=3,
        embed_dim=192,
        decoder_embed_dim=512,
        decoder_depth=8,
        decoder_num_heads=16,
        mlp_ratio=4.0,
    ),
    head=dict(
        type='MAEPretrainHead',
        norm_pix=True,
        patch_size=16,
        loss=dict(type='PixelReconstructionLoss', criterion='L2'),
    ),
    init_cfg=[
        dict(type='Xavier', layer='Linear', distribution='uniform'),
        dict(type='Constant', layer='LayerNorm', val=1.0, bias=0.0),
    ],
)

train_cfg = dict(by_epoch=True, max_epochs=300)
param_scheduler = [
    dict(
        type='LinearLR',
        start_factor=1e-4,
        by_epoch=True,
        begin=0,
        end=40,
        convert_to_iter_based=True,
    ),
    dict(
        type='CosineAnnealingLR',
        T_max=260,
        by_epoch=True,
        begin=40,
        end=300,
        convert_to_iter_based=True,
    ),
]
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=2.4e-3, betas=(0.9, 0.95), weight_decay=0.05),
    paramwise_cfg=dict(
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
        custom_keys={
            'pos_embed': dict(decay_mult=0.0),
            'mask_token': dict(decay_mult=0.0),
            'cls_token': dict(decay_mult=0.0),
        },
    ),
)

# 8 GPUs x 512 images
auto_scale_lr = dict(enable=False, base_batch_size=4096)
