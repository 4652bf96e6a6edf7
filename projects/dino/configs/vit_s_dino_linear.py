# The linear evaluation of a vanilla ViT-S.
_base_ = 'repa_vit_s_dino_linear.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='VisionTransformer',
        arch='deit-small',
        out_type='cls_token',
        out_indices=[8, 9, 10, 11],
        frozen_stages=12,
        interpolate_mode='bicubic',
        init_cfg=dict(
            type='Pretrained',
            checkpoint='work_dirs/vit_s_dino/epoch_300.pth',
            prefix='teacher.backbone.',
        ),
    )
)
custom_hooks = []
