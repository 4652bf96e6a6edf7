_base_ = 'repa_poolformer_s12_in1k.py'

model = dict(backbone=dict(arch='s24', drop_path_rate=0.01))

optim_wrapper = dict(optimizer=dict(lr=3.5e-3, weight_decay=0.08))
param_scheduler = [
    dict(
        type='LinearLR',
        start_factor=1e-6 / 3.5e-3,  # from 1e-6
        by_epoch=True,
        begin=0,
        end=20,
        convert_to_iter_based=True,
    ),
    dict(
        type='CosineAnnealingLR',
        eta_min=1.5e-6,
        by_epoch=True,
        begin=20,
        end=300,
        convert_to_iter_based=True,
    ),
]
