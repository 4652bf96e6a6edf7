"""Small models that have learned to find coloured rectangles, in seconds."""

import cv2
import numpy as np
import torch
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmengine.structures import InstanceData, PixelData
from mmpretrain.structures import DataSample
from mmseg.structures import SegDataSample

COLOURS = np.array([(60, 60, 230), (60, 230, 60), (230, 60, 60)], np.uint8)


def scene(rng, task, size=64):
    """An image, and a data sample with its one to three rectangles; labels are their colours."""
    image = cv2.resize(rng.integers(0, 100, (6, 6, 3), np.uint8), (size, size))
    label_map, boxes, labels, masks = np.zeros((size, size), int), [], [], []
    for _ in range(rng.integers(1, 4)):
        height, width = rng.integers(size // 4, size // 2, 2)
        top, left = rng.integers(size - height), rng.integers(size - width)
        inside = slice(top, top + height), slice(left, left + width)
        if not label_map[inside].any():
            labels.append(int(rng.integers(3)))
            image[inside], label_map[inside] = COLOURS[labels[-1]], labels[-1] + 1
            boxes.append([left, top, left + width, top + height])
            masks.append(label_map > 0)
    keys = 'img_shape', 'ori_shape', 'batch_input_shape', 'pad_shape'
    meta = dict(dict.fromkeys(keys, (size, size)), scale_factor=(1.0, 1.0), img_id=0, flip=False)
    if task == 'classifier':
        sample = DataSample(metainfo=meta).set_gt_label(labels[0])
    elif task == 'upernet':
        sample = SegDataSample(metainfo=meta)
        sample.gt_sem_seg = PixelData(data=torch.from_numpy(label_map)[None])
    else:
        sample = DetDataSample(metainfo=meta)
        sample.gt_instances = InstanceData(
            bboxes=torch.tensor(boxes, dtype=torch.float32),
            labels=torch.tensor(labels),
            masks=BitmapMasks(np.stack(masks).astype(np.uint8), size, size),
        )
        none = torch.zeros(0)
        sample.ignored_instances = InstanceData(bboxes=none.view(0, 4), labels=none.long())
    return torch.from_numpy(image).permute(2, 0, 1), sample


def batch(rng, task, number=1, **kwargs):
    """Scenes as a batch of a data loader."""
    inputs, samples = zip(*(scene(rng, task, **kwargs) for _ in range(number)))
    return dict(inputs=list(inputs), data_samples=list(samples))


def train(model, task, iters, lr, **kwargs):
    """Train a model on batches of eight scenes, in place."""
    rng = np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, iters)
    model.train()
    for _ in range(iters):
        data = model.data_preprocessor(batch(rng, task, 8, **kwargs), True)
        loss, _ = model.parse_losses(model(**data, mode='loss'))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10)
        optimizer.step()
        schedule.step()
    model.eval()  # which returns None for some
