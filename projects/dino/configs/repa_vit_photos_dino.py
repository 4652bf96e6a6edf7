_base_ = 'vit_photos_dino.py'

model = dict(backbone=dict(type='RePaVisionTransformer', idle_ratio=0.75))
