"""Configs of very small models."""

import repa_mm

TINY = """
_base_ = {base!r}
model = dict(
    backbone=dict(arch=dict(embed_dims=24, depths=[1, 1, 1, 1],
                            num_heads=[1, 2, 2, 2])),
    {heads})
train_dataloader = dict(batch_size=1, num_workers=0)
{more}
"""
DETECTOR = dict(
    base='demo/{}retinanet{}_swin_digits.py',
    more='',
    heads='neck=dict(in_channels=[48, 96, 192], out_channels=32), '
    'bbox_head=dict(in_channels=32, feat_channels=32)',
)
SEGMENTOR = dict(
    base='demo/{}upernet{}_swin_digits.py',
    more='train_cfg = dict(max_iters=1, val_interval=1)',
    heads='decode_head=dict(in_channels=[24, 48, 96, 192], channels=16), '
    'auxiliary_head=dict(in_channels=96, channels=16)',
)


def tiny(base, heads, more, repa=True):
    """The text of a config of a very small model."""
    base = base.format('', '_repa' if repa else '')
    return TINY.format(base=repa_mm.config_path(base), heads=heads, more=more)
