_base_ = 'dino_vit_photos.py'

model = dict(backbone=dict(type='RePaVisionTransformer', idle_ratio=0.75))
