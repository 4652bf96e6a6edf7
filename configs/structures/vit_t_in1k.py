# An ordinary ViT-T of 12 layers with the recipe of parallel_vit_t_6_in1k.py, to compare with.
_base_ = 'parallel_vit_t_6_in1k.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='mmpretrain.VisionTransformer',
        arch='deit-tiny',
        out_type='avg_featmap',
        final_norm=False,
    )
)
custom_hooks = []
