_base_ = ['_base_/models/poolformer_classifier.py', '_base_/repa_in1k.py']

optim_wrapper = dict(optimizer=dict(lr=2.5e-3, weight_decay=0.16))
_base_.param_scheduler[0].start_factor = 1e-6 / 2.5e-3
_base_.param_scheduler[1].eta_min = 6e-6
