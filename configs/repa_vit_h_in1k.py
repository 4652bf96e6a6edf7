# Its settings are not published: these are the ones of RePa-ViT-L. Patches
# have 16x16 pixels.
_base_ = 'repa_vit_l_in1k.py'

model = dict(backbone=dict(arch='huge', drop_path_rate=0.3), head=dict(in_channels=1280))
