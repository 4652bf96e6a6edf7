# Swin-S, 2-2-18-2 layers, as 2-2-6-2 blocks with 3 branches in the third stage, deployed as an
# ordinary Swin of 2-2-6-2 layers. An ordinary Swin-S can be given as
# backbone.init_cfg=dict(type='Pretrained', checkpoint=…, prefix='backbone.'): its layers fill the
# branches.
_base_ = '../../../configs/swin_s_in1k.py'
custom_imports = dict(
    imports=['repa_mm', 'projects.depth_reparameterization'], allow_failed_imports=False
)

model = dict(
    backbone=dict(type='ParallelSwinTransformer', arch='small', num_branches=3, drop_path_rate=0.2)
)
custom_hooks = [dict(type='ScheduleHook', warmup=10000)]
default_hooks = dict(reparameterize=dict(type='ReparameterizeHook'))  # test the merged model
