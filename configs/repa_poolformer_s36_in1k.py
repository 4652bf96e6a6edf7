_base_ = 'repa_poolformer_s12_in1k.py'

model = dict(backbone=dict(arch='s36', drop_path_rate=0.03))

optim_wrapper = dict(optimizer=dict(lr=5.5e-3, weight_decay=0.01))
_base_.param_scheduler[0].start_factor = 1e-6 / 5.5e-3
_base_.param_scheduler[1].eta_min = 3e-6
