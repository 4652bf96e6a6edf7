# 12 epochs on COCO with AdamW: MMDetection's Mask R-CNN with Swin.
_base_ = 'coco_1x_sgd.py'

optim_wrapper = dict(
    optimizer=dict(_delete_=True, type='AdamW', lr=0.0001, betas=(0.9, 0.999), weight_decay=0.05)
)
_base_.param_scheduler[0].end = 1000  # iterations of warm-up
