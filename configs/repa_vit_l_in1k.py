# The settings are those of the authors' released code: the paper's table leaves them out.
_base_ = 'repa_deit_t_in1k.py'

model = dict(backbone=dict(arch='large', drop_path_rate=0.3), head=dict(in_channels=1024))

optim_wrapper = dict(optimizer=dict(lr=1e-3, weight_decay=0.05))
_base_.param_scheduler[0].start_factor = 1e-6 / 1e-3
_base_.param_scheduler[1].eta_min = 5e-5
