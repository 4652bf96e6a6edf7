# The demo's small detector on the scenes of clothes that `benchmarks/objects.py` writes, which are
# harder than digits.
_base_ = 'retinanet_swin_digits.py'

data_root = 'data/clothes/coco/'
classes = ('T-shirt', 'trousers', 'pullover', 'dress', 'coat')
classes += ('sandal', 'shirt', 'sneaker', 'bag', 'ankle boot')
dataset = dict(data_root=data_root, metainfo=dict(classes=classes))
train_dataloader = dict(dataset=dataset)
val_dataloader = dict(dataset=dataset)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val2017.json', classwise=True)
test_evaluator = val_evaluator

max_epochs = 2
train_cfg = dict(max_epochs=max_epochs, val_interval=1)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(
        type='CosineAnnealingLR', by_epoch=True, begin=0, end=max_epochs, convert_to_iter_based=True
    ),
]
