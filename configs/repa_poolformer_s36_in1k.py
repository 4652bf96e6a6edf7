_base_ = 'repa_poolformer_s12_in1k.py'

model = dict(backbone=dict(arch='s36', drop_path_rate=0.03))

optim_wrapper = dict(optimizer=dict(lr=5.5e-3, weight_decay=0.01))
param_scheduler = [
    dict(
        type='LinearLR',
        start_factor=1e-6 / 5.5e-3,  # from 1e-6
        by_epoch=True,
        begin=0,
        end=20,
        convert_to_iter_based=True,
    ),
    dict(
        type='CosineAnnealingLR',
        eta_min=3e-6,
        by_epoch=True,
        begin=20,
        end=300,
        convert_to_iter_based=True,
    ),
]
