# MMDetection's DINO with channel-idle FFNs in its encoder, which works on all tokens. Half of the
# model's multiply-adds are in these FFNs.
_base_ = 'mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py'
custom_imports = dict(imports=['repa_mm'], allow_failed_imports=False)

model = dict(
    _delete_=True,
    type='Restructured',
    model={{_base_.model}},
    structures=[dict(type='ChannelIdle', where='encoder', idle_ratio=0.75)],
)
default_hooks = dict(reparameterize=dict(type='ReparameterizeHook'))  # test the merged model
