# A DeiT-T whose FFNs are 4 experts, averaged a little after each step and merged into their mean:
# Experts Weights Averaging, https://arxiv.org/abs/2308.06093. The recipe of RePa-DeiT-T.
_base_ = '../repa_deit_t_in1k.py'

model = dict(backbone=dict(type='ExpertsVisionTransformer', num_experts=4, idle_ratio=None))
custom_hooks = [dict(type='AverageExpertsHook', rate=1e-3), dict(type='ReparameterizeHook')]
