# A DeiT-T whose FFNs are 4 experts, averaged a little after each step and merged into their mean:
# Experts Weights Averaging, https://arxiv.org/abs/2308.06093. The recipe of RePa-DeiT-T.
_base_ = '../../../configs/repa_deit_t_in1k.py'
custom_imports = dict(imports=['repa_mm', 'projects.expert_averaging'], allow_failed_imports=False)

model = dict(
    backbone=dict(
        _delete_=True,
        type='ExpertsVisionTransformer',
        arch='deit-tiny',
        num_experts=4,
        drop_path_rate=0.02,
        pre_norm=True,
        layer_cfgs=dict(norm_cfg=dict(type='LN', eps=1e-5)),
    )
)
custom_hooks = [dict(type='AverageExpertsHook', rate=1e-3)]
