# A PoolFormer-s12 without token mixers, which imitates one with them: RIFormer,
# https://arxiv.org/abs/2304.05659. The recipe of RePa-PoolFormer-s12.
_base_ = '../../../configs/repa_poolformer_s12_in1k.py'
custom_imports = dict(imports=['repa_mm', 'projects.riformer'], allow_failed_imports=False)

teacher = 'checkpoints/poolformer_s12_in1k.pth'  # of MMPretrain's model zoo
model = dict(backbone=dict(_delete_=True, type='AffineRIFormer', arch='s12', drop_path_rate=0.02))
custom_hooks = [
    dict(
        type='ImitateMixersHook',
        teacher=dict(
            type='mmpretrain.PoolFormer',
            arch='s12',
            init_cfg=dict(type='Pretrained', checkpoint=teacher, prefix='backbone.'),
        ),
    )
]
