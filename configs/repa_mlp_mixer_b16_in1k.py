_base_ = ['_base_/models/mlp_mixer_classifier.py', '_base_/repa_in1k.py']

optim_wrapper = dict(optimizer=dict(lr=5e-3, weight_decay=0.13))
_base_.param_scheduler[0].start_factor = 1e-6 / 5e-3
_base_.param_scheduler[1].eta_min = 5e-6
