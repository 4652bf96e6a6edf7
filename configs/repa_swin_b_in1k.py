_base_ = 'repa_swin_t_in1k.py'

model = dict(backbone=dict(arch='base', drop_path_rate=0.08), head=dict(in_channels=1024))

optim_wrapper = dict(optimizer=dict(lr=4e-3, weight_decay=0.10))
_base_.param_scheduler[0].start_factor = 1e-6 / 4e-3
_base_.param_scheduler[1].eta_min = 2e-5
