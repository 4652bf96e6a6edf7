# UperNet on a RePa-ViT-S that DINO has pretrained: the teacher of work_dirs/repa_vit_s_dino. Its
# position embeddings are resized from 14x14 to 32x32 when they are loaded.
_base_ = [
    '../../../configs/_base_/models/upernet_swin.py',
    '../../../configs/_base_/datasets/ade20k.py',
    '../../../configs/_base_/schedules/ade20k_160k_adamw.py',
    '../../../configs/_base_/runtime/mmseg.py',
]
default_hooks = dict(reparameterize=dict(type='ReparameterizeHook'))  # test the merged model

model = dict(
    backbone=dict(
        _delete_=True,
        type='RePaVisionTransformer',
        arch='deit-small',
        idle_ratio=0.75,
        img_size=512,
        out_type='featmap',
        out_indices=[2, 5, 8, 11],
        drop_path_rate=0.1,
        interpolate_mode='bicubic',
        init_cfg=dict(
            type='Pretrained',
            checkpoint='work_dirs/repa_vit_s_dino/epoch_300.pth',
            prefix='teacher.backbone.',
        ),
    ),
    neck=dict(
        type='Feature2Pyramid',
        embed_dim=384,
        rescales=[4, 2, 1, 0.5],
        norm_cfg=dict(type='SyncBN', requires_grad=True),
    ),
    decode_head=dict(type='FastUPerHead', in_channels=[384] * 4),
    auxiliary_head=dict(in_channels=384),
)
