_base_ = 'repa_lvvit_s_in1k.py'

model = dict(backbone=dict(arch='m', drop_path_rate=0.10), head=dict(in_channels=512))
