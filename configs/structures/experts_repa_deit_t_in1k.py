# As experts_deit_t_in1k.py, with channel-idle experts.
_base_ = 'experts_deit_t_in1k.py'

model = dict(backbone=dict(idle_ratio=0.75))
