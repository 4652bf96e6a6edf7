# The authors have not published its settings: these are those of RePa-ViT-L. Patches have 16x16
# pixels.
_base_ = 'repa_vit_l_in1k.py'

model = dict(backbone=dict(arch='huge', drop_path_rate=0.3), head=dict(in_channels=1280))
