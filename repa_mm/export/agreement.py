"""How far an exported model finds what the model finds."""

import copy
from collections.abc import Sequence

import torch
import torch.nn as nn
from mmengine.structures import BaseDataElement
from scipy.optimize import linear_sum_assignment
from torchvision.ops import box_iou

#: Smallest intersection over union of two objects that are the same one.
OVERLAP = 0.75


@torch.no_grad()
def agreement(model: nn.Module, exported: nn.Module, batches: Sequence[dict]) -> float:
    """Measure whether an exported model finds what the model finds.

    The agreement is the Dice coefficient 2 Σ ab / (Σ a² + Σ b²) over all images, where a and b are
    the scores of one object, of one class of a classifier or, each 1 or 0, of one label of a pixel:
    for segmentors it is the share of pixels with equal labels. Objects are paired one to one if
    their labels are equal and the intersection over union of their boxes, or masks, is at least
    :data:`OVERLAP`; the counterpart of an object without a pair has the score 0.

    Args:
        model (nn.Module): The model.
        exported (nn.Module): An :class:`~repa_mm.export.exported.ExportedModel`.
        batches (Sequence[dict]): From a data loader.

    Returns:
        float: 1 if both find the same, 0 if they have nothing in common.

    Raises:
        ValueError: If both together find less than two objects with a score of 1.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for data in batches:
        outputs = (m.test_step(copy.deepcopy(data)) for m in (exported, model))
        for pair in zip(*outputs, strict=True):
            sums += torch.tensor([float(x) for x in _in_common(*pair)])
    common, *squares = sums.tolist()
    if sum(squares) < 2:
        raise ValueError(
            f'the model finds next to nothing in the {len(batches)} images to compare on: give '
            'images with something to find, or more images'
        )
    return 2 * common / sum(squares)


def _in_common(found: BaseDataElement, expected: BaseDataElement) -> tuple:
    """Σ ab, Σ a² and Σ b² of the predictions for one image."""
    if 'pred_sem_seg' in expected:
        a, b = found.pred_sem_seg.data, expected.pred_sem_seg.data
        return (a == b).sum(), a.numel(), b.numel()
    if 'pred_score' in expected:
        a, b = found.pred_score, expected.pred_score
        return (a * b).sum(), a.square().sum(), b.square().sum()
    a, b = found.pred_instances, expected.pred_instances
    overlaps = box_iou(a.bboxes, b.bboxes)
    if 'masks' in b:
        x, y = a.masks.flatten(1).float(), b.masks.flatten(1).float()
        both = x @ y.T
        overlaps = both / (x.sum(1)[:, None] + y.sum(1) - both).clamp(min=1)
    fits = (overlaps >= OVERLAP) & (a.labels[:, None] == b.labels)
    products = (fits * a.scores[:, None] * b.scores).nan_to_num()
    pairs = linear_sum_assignment(products.numpy(), maximize=True)
    return products[pairs].sum(), a.scores.square().sum(), b.scores.square().sum()
