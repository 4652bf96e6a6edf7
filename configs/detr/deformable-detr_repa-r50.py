# MMDetection's Deformable DETR with channel-idle FFNs in its encoder. With
# model.model.encoder.layer_cfg.ffn_cfg.ffn_drop=0.0, training leaves out the idle channels, too.
_base_ = 'mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py'
custom_imports = dict(imports=['repa_mm'], allow_failed_imports=False)

model = dict(
    _delete_=True,
    type='Restructured',
    model={{_base_.model}},
    structures=[dict(type='ChannelIdle', where='encoder', idle_ratio=0.75)],
)
default_hooks = dict(reparameterize=dict(type='ReparameterizeHook'))  # test the merged model
