# MMDetection's Mask2Former with channel-idle FFNs in the Swin and in the encoder of the pixel
# decoder.
_base_ = 'mmdet::mask2former/mask2former_swin-t-p4-w7-224_8xb2-lsj-50e_coco.py'
custom_imports = dict(imports=['repa_mm'], allow_failed_imports=False)

model = dict(
    _delete_=True,
    type='Restructured',
    model={{_base_.model}},
    structures=[
        dict(type='ChannelIdle', where='backbone', idle_ratio=0.75),
        dict(type='ChannelIdle', where='encoder', idle_ratio=0.75),
    ],
)
default_hooks = dict(reparameterize=dict(type='ReparameterizeHook'))  # test the merged model
# The base config sets the decay of each norm of the backbone by its name; these have other names.
optim_wrapper = dict(
    paramwise_cfg=dict(custom_keys={'.ffn.norm': dict(lr_mult=0.1, decay_mult=0.0)})
)
