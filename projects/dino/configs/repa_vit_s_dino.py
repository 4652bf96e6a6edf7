# RePa-ViT-S/16, pretrained by DINO: table 5 of the RePaFormer paper.
_base_ = 'vit_s_dino.py'

model = dict(backbone=dict(type='RePaVisionTransformer', idle_ratio=0.75))
