_base_ = ['_base_/models/vit_classifier.py', '_base_/repa_in1k.py']

optim_wrapper = dict(optimizer=dict(lr=2.5e-3, weight_decay=0.02))
_base_.param_scheduler[0].start_factor = 1e-6 / 2.5e-3
_base_.param_scheduler[1].eta_min = 1e-6
