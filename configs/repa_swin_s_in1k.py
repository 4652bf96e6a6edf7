_base_ = 'repa_swin_t_in1k.py'

model = dict(backbone=dict(arch='small', drop_path_rate=0.09))

optim_wrapper = dict(optimizer=dict(lr=6e-3, weight_decay=0.15))
param_scheduler = [
    dict(
        type='LinearLR',
        start_factor=1e-6 / 6e-3,  # from 1e-6
        by_epoch=True,
        begin=0,
        end=20,
        convert_to_iter_based=True,
    ),
    dict(
        type='CosineAnnealingLR',
        eta_min=5e-5,
        by_epoch=True,
        begin=20,
        end=300,
        convert_to_iter_based=True,
    ),
]
