_base_ = 'repa_deit_t_in1k.py'

model = dict(backbone=dict(arch='deit-small', drop_path_rate=0.04), head=dict(in_channels=384))

optim_wrapper = dict(optimizer=dict(lr=3e-3, weight_decay=0.05))
_base_.param_scheduler[0].start_factor = 1e-6 / 3e-3
_base_.param_scheduler[1].eta_min = 4e-5
