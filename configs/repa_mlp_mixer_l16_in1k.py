_base_ = 'repa_mlp_mixer_b16_in1k.py'

model = dict(backbone=dict(arch='large', drop_path_rate=0.05), head=dict(in_channels=1024))

optim_wrapper = dict(optimizer=dict(lr=4e-3, weight_decay=0.16))
_base_.param_scheduler[0].start_factor = 1e-6 / 4e-3
_base_.param_scheduler[1].eta_min = 1e-5
