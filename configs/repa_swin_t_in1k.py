_base_ = ['_base_/models/swin_classifier.py', '_base_/repa_in1k.py']

model = dict(backbone=dict(type='RePaSwinTransformer', idle_ratio=0.75, drop_path_rate=0.10))
