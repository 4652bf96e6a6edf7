_base_ = 'repa_poolformer_s12_in1k.py'

model = dict(backbone=dict(arch='s24', drop_path_rate=0.01))

optim_wrapper = dict(optimizer=dict(lr=3.5e-3, weight_decay=0.08))
_base_.param_scheduler[0].start_factor = 1e-6 / 3.5e-3
_base_.param_scheduler[1].eta_min = 1.5e-6
