# RePa-ViT-B/16, pretrained by DINO: table 5 of the RePaFormer paper.
_base_ = 'repa_vit_s_dino.py'

model = dict(backbone=dict(arch='deit-base'), neck=dict(in_channels=768))
