_base_ = 'retinanet_swin_digits.py'
default_hooks = dict(reparameterize=dict(type='ReparameterizeHook'))  # test the merged model

# BatchNorm learns its statistics here: nothing is pretrained, and images of one
# size are a fair batch.
model = dict(backbone=dict(type='RePaSwinTransformer', idle_ratio=0.75))
