_base_ = 'repa_deit_t_in1k.py'

model = dict(backbone=dict(arch='deit-base', drop_path_rate=0.10), head=dict(in_channels=768))

optim_wrapper = dict(optimizer=dict(lr=4e-3, weight_decay=0.07))
param_scheduler = [
    dict(
        type='LinearLR',
        start_factor=1e-6 / 4e-3,  # from 1e-6
        by_epoch=True,
        begin=0,
        end=20,
        convert_to_iter_based=True,
    ),
    dict(
        type='CosineAnnealingLR',
        eta_min=4e-5,
        by_epoch=True,
        begin=20,
        end=300,
        convert_to_iter_based=True,
    ),
]
