_base_ = 'repa_swin_t_in1k.py'

model = dict(backbone=dict(arch='small', drop_path_rate=0.09))

optim_wrapper = dict(optimizer=dict(lr=6e-3, weight_decay=0.15))
_base_.param_scheduler[0].start_factor = 1e-6 / 6e-3
_base_.param_scheduler[1].eta_min = 5e-5
