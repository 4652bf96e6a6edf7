# RePa-ViT-S/16, pretrained by DINO: table 5 of the RePaFormer paper.
_base_ = 'vit_s_dino.py'

model = dict(
    backbone=dict(type='RePaVisionTransformer', idle_ratio=0.75),
    # Local crops are normalized by their own statistics, and leave the running ones, which the
    # deploy form is made of, to the global crops. 'all' is what the authors' code does.
    statistics_of='global',
)
