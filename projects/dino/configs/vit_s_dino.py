# ViT-S/16, pretrained by DINO: https://arxiv.org/abs/2104.14294. Needs `pip install lightly`. Mixed
# precision, as in the paper: tools/train.py --amp.
_base_ = [
    '_base_/imagenet_crops.py',
    '_base_/schedule_300e.py',
    '../../../configs/_base_/runtime/mmpretrain.py',
]
custom_imports = dict(imports=['repa_mm', 'projects.dino'], allow_failed_imports=False)

model = dict(
    type='DINO',
    data_preprocessor=dict(
        type='SelfSupDataPreprocessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        to_rgb=True,
    ),
    backbone=dict(
        type='VisionTransformer',
        arch='deit-small',
        patch_size=16,
        out_type='cls_token',
        drop_path_rate=0.1,
        interpolate_mode='bicubic',
    ),
    neck=dict(type='DINOProjection', in_channels=384, out_channels=65536, norm_last_layer=False),
    head=dict(
        type='DINOHead',
        out_channels=65536,
        warmup_teacher_temperature=0.04,
        teacher_temperature=0.07,
        warmup_epochs=30,
    ),
    num_global_crops=2,
)
