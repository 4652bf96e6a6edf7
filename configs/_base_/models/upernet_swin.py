# MMSegmentation's UperNet on MMPretrain's Swin-T. A run that is not distributed, on a CPU too,
# turns the heads' SyncBN into BN by itself; several processes on CPUs need
# norm_cfg=dict(type='BN') in both heads.
_base_ = __import__('repa_mm').config_path('mmseg::_base_/models/upernet_swin.py')

data_preprocessor = None  # the model has it
model = dict(
    data_preprocessor=dict(size=(512, 512)),
    backbone=dict(
        _delete_=True,
        type='mmpretrain.SwinTransformer',
        arch='tiny',
        drop_path_rate=0.3,
        pad_small_map=True,
        out_indices=(0, 1, 2, 3),
    ),
    decode_head=dict(num_classes=150),
    auxiliary_head=dict(num_classes=150),
)
