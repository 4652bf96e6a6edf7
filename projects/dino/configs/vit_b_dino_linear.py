# The linear evaluation of a vanilla ViT-B, on the class token and the mean of the
# patch tokens of the last block.
_base_ = 'vit_s_dino_linear.py'

model = dict(
    backbone=dict(
        arch='deit-base',
        out_type='raw',
        out_indices=[11],
        init_cfg=dict(checkpoint='work_dirs/vit_b_dino/epoch_300.pth'),
    ),
    neck=dict(patch_mean=True),
    head=dict(in_channels=2 * 768),
)
