# A ViT-T of 6 blocks with 2 branches each (12 layers), deployed as 6 ordinary layers: the second step
# of https://arxiv.org/abs/2511.19718, from the masked autoencoder of parallel_vit_t_6_mae.py. The
# schedule of lambda is the paper's, the rest of the recipe is that of the ordinary ViT-T, with the
# decay of learning rates of its 12 layers.
_base_ = 'vit_t_in1k.py'
custom_imports = dict(
    imports=['repa_mm', 'projects.depth_reparameterization'], allow_failed_imports=False
)
default_hooks = dict(reparameterize=dict(type='ReparameterizeHook'))  # test the merged model

# An ordinary ViT-T of 12 layers can be given, too: its layers fill the branches.
pretrained = 'checkpoints/parallel_vit_t_6_mae.pth'
model = dict(
    backbone=dict(
        type='ParallelVisionTransformer',
        arch='vit-tiny',
        num_branches=2,
        init_cfg=dict(type='Pretrained', checkpoint=pretrained, prefix='backbone.'),
    )
)
# 1251 iterations an epoch: the branches are joined in the first 8 epochs.
custom_hooks = [dict(type='ScheduleHook', warmup=10000)]
