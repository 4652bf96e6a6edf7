# RePa-MLP-Mixer-b16 classifier; head, losses and batch augmentation are those of the Swin. As in
# RePaFormer's released models, the norm of the token mixing is over the tokens, and the epsilons
# differ.
_base_ = 'swin_classifier.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='RePaMlpMixer',
        arch='base',
        idle_ratio=0.75,
        drop_path_rate=0.04,
        token_norm=True,
        norm_cfg=dict(type='LN', eps=1e-6),
        layer_cfgs=dict(norm_cfg=dict(type='LN', eps=1e-5)),
    ),
    neck=dict(dim=1),
    init_cfg=dict(_delete_=True, type='TruncNormal', layer='Linear', std=0.02, bias=0.0),
)
