# RetinaNet on a RePa-ViT-S that DINO has pretrained: the teacher of work_dirs/repa_vit_s_dino. The
# neck that makes four maps is MMSegmentation's.
_base_ = '../../../configs/retinanet_repa_swin_t.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='RePaVisionTransformer',
        arch='deit-small',
        idle_ratio=0.75,
        img_size=1024,  # what the position embeddings are resized to; any image goes in
        out_type='featmap',
        out_indices=[2, 5, 8, 11],
        init_cfg=dict(
            type='Pretrained',
            checkpoint='work_dirs/repa_vit_s_dino/epoch_300.pth',
            prefix='teacher.backbone.',
        ),
    ),
    neck=[
        dict(type='mmseg.Feature2Pyramid', embed_dim=384, rescales=[2, 1, 0.5, 0.25]),
        dict(
            type='FPN',
            in_channels=[384] * 4,
            out_channels=256,
            add_extra_convs='on_input',
            num_outs=5,
        ),
    ],
)
