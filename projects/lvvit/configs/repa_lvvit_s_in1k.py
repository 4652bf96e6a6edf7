_base_ = [
    '_base_/lvvit_classifier.py',
    '_base_/imagenet_token_label.py',
    '../../../configs/_base_/schedules/imagenet_lamb.py',
    '../../../configs/_base_/runtime/mmpretrain.py',
]
custom_imports = dict(imports=['repa_mm', 'projects.lvvit'], allow_failed_imports=False)
default_hooks = dict(reparameterize=dict(type='ReparameterizeHook'))  # test the merged model

train_dataloader = dict(batch_size=128)

optim_wrapper = dict(optimizer=dict(lr=1e-3, weight_decay=0.05))
param_scheduler = [
    dict(
        type='LinearLR',
        start_factor=1e-6 / 1e-3,  # from 1e-6
        by_epoch=True,
        begin=0,
        end=20,
        convert_to_iter_based=True,
    ),
    dict(
        type='CosineAnnealingLR',
        eta_min=1e-5,
        by_epoch=True,
        begin=20,
        end=300,
        convert_to_iter_based=True,
    ),
]

# 8 GPUs x 128 images
auto_scale_lr = dict(base_batch_size=1024)
