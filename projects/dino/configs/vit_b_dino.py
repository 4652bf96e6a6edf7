# ViT-B/16, pretrained by DINO.
_base_ = 'vit_s_dino.py'

model = dict(backbone=dict(arch='deit-base'), neck=dict(in_channels=768))
