# The demo's scenes of digits, with masks.
_base_ = './digits_detection.py'

_base_.train_pipeline[1].with_mask = True
_base_.test_pipeline[2].with_mask = True
train_dataloader = dict(dataset=dict(pipeline={{_base_.train_pipeline}}))
val_dataloader = dict(dataset=dict(pipeline={{_base_.test_pipeline}}))
test_dataloader = val_dataloader

val_evaluator = dict(metric=['bbox', 'segm'])
test_evaluator = val_evaluator
