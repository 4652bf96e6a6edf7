"""How far an exported model finds what the model finds."""

import copy
from collections.abc import Sequence

import torch
import torch.nn as nn
from mmengine.structures import BaseDataElement, InstanceData
from scipy.optimize import linear_sum_assignment
from torchvision.ops import box_iou

#: Smallest intersection over union of two objects that are the same one.
OVERLAP = 0.75
#: Labels of pixels are smaller.
MAX_CLASSES = 1000
#: Batches after which a comparison without hope ends: large images take seconds each.
FEW = 8


@torch.no_grad()
def agreement(
    model: nn.Module,
    exported: nn.Module,
    batches: Sequence[dict],
    exact: bool = False,
    hopeless: float = 0.0,
) -> float:
    """Measure whether an exported model finds what the model finds.

    Detections are compared by the Dice coefficient 2 Σ ab / (Σ a² + Σ b²) over all images, where a
    and b are the scores of one object. Objects are paired one to one if their labels are equal and
    the intersection over union of their boxes, and of their masks, is at least :data:`OVERLAP`; the
    counterpart of an object without a pair has the score 0. Segments of panoptic maps are objects
    with a score of 1; if there are instances, too, their coefficients are averaged. Label maps are
    compared by the Dice coefficient of the pixels of each class, on average over the classes that
    either has. For classifiers it is the coefficient of all scores, or that of the labels if it is
    less.

    Args:
        model (nn.Module): The model, on any device.
        exported (nn.Module): An :class:`~repa_mm.export.ExportedModel`.
        batches (Sequence[dict]): From a data loader.
        exact (bool): Let nothing differ by more than rounding. Paired are objects with scores
            within 1e-3, box coordinates within 0.1 pixels, and masks that differ in less than 2 %
            of the box's area plus 4 pixels, and each counts as 1: the agreement is the share of
            objects with a counterpart. For label maps and panoptic maps it is the share of equal
            pixels, for classifiers 1 minus the largest difference of a score, on average over the
            images. Defaults to False.
        hopeless (float): Stop below this agreement on the first :data:`FEW` batches. Defaults to 0.

    Returns:
        float: 1 if both find the same, 0 if they have nothing in common; NaN if ``exact`` and
        neither finds an object.

    Raises:
        ValueError: If both together find fewer than two objects with a score of 1.
    """
    parts = []
    for i, data in enumerate(batches, 1):
        outputs = (m.test_step(copy.deepcopy(data)) for m in (exported, model))
        pairs = zip(*outputs, strict=True)  # the model may be on a GPU
        parts += [in_common(a.cpu(), b.cpu(), exact) for a, b in pairs]
        if i == FEW and hopeless and dice(torch.stack(parts)) < hopeless:
            break
    if not exact and sum(part[1:3].sum() for part in parts) < 2:
        raise ValueError(
            f'the model finds next to nothing in the {len(batches)} images to compare on: give '
            'images with something to find, or more images'
        )
    return dice(torch.stack(parts))


def dice(parts: torch.Tensor) -> float:
    """Compute the agreement from the parts of images.

    Args:
        parts (torch.Tensor): From :func:`in_common` for each image, (images, 4, classes).
    """
    common, first, second, labels = parts.sum(0)
    squares = first + second
    found = float((2 * common / squares)[squares > 0].mean())
    return found if labels.isnan().any() else min(found, float(labels[0]) / len(parts))


def in_common(
    found: BaseDataElement, expected: BaseDataElement, exact: bool = False
) -> torch.Tensor:
    """Return Σ ab, Σ a², Σ b² of the predictions for one image, and the agreement of labels.

    Returns:
        torch.Tensor: (4, classes), with NaN in the last row for detections and label maps.
    """
    parts = torch.stack(_sums(found, expected, exact)).double()
    labels = torch.nan
    if 'pred_score' in expected:  # a classifier, of one label or of any number of labels
        a, b = ({*x.pred_label.flatten().tolist()} for x in (found, expected))
        labels = 2 * len(a & b) / (len(a) + len(b)) if a or b else 1.0
    return torch.cat([parts, parts.new_full((1, parts.shape[1]), labels)])


def _sums(found: BaseDataElement, expected: BaseDataElement, exact: bool) -> tuple:
    if 'pred_sem_seg' in expected:
        a, b = found.pred_sem_seg.data, expected.pred_sem_seg.data
        if exact:
            return _equal(a, b)
        return tuple(x.flatten().bincount(minlength=MAX_CLASSES) for x in (a[a == b], a, b))
    if 'pred_score' in expected:
        a, b = found.pred_score, expected.pred_score
        if exact:
            one = torch.ones(1)
            return one - (a - b).abs().max(), one, one
        return tuple(x.sum()[None] for x in (a * b, a * a, b * b))
    pairs = []
    if 'pred_instances' in expected:
        pairs.append(_sums_of_objects(found.pred_instances, expected.pred_instances, exact))
    if 'pred_panoptic_seg' in expected:
        a, b = (x.pred_panoptic_seg.sem_seg for x in (found, expected))
        pairs.append(_equal(a, b) if exact else _sums_of_objects(_segments(a), _segments(b), False))
    return tuple(torch.cat([x.reshape(1) for x in column]) for column in zip(*pairs))


def _equal(a: torch.Tensor, b: torch.Tensor) -> tuple:
    number = torch.tensor([a.numel()])
    return (a == b).sum()[None], number, number


def _segments(panoptic: torch.Tensor) -> InstanceData:
    """Return the segments of a map (1, H, W), in MMDetection's encoding, as objects."""
    from mmdet.evaluation import INSTANCE_OFFSET

    found = panoptic.unique()
    found = found[: len(found) if len(found) > 1 else 0]  # one segment: nothing is found
    return InstanceData(
        bboxes=torch.zeros(len(found), 4),
        scores=torch.ones(len(found)),
        labels=found % INSTANCE_OFFSET,
        masks=panoptic == found[:, None, None],
    )


def _sums_of_objects(a: InstanceData, b: InstanceData, exact: bool) -> tuple:
    fits, one, other = a.labels[:, None] == b.labels, a.scores, b.scores
    if 'masks' in b:
        x, y = a.masks.flatten(1).float(), b.masks.flatten(1).float()
        both, either = x @ y.T, x.sum(1)[:, None] + y.sum(1)
    if exact:
        fits &= (a.bboxes[:, None] - b.bboxes).abs().amax(-1) < 0.1
        fits &= (one[:, None] - other).abs() < 1e-3
        if 'masks' in b:
            areas = (a.bboxes[:, 2:] - a.bboxes[:, :2]).prod(1)
            fits &= either - 2 * both < 0.02 * areas[:, None] + 4
        one, other = torch.ones(len(a)), torch.ones(len(b))
    else:
        overlaps = box_iou(a.bboxes, b.bboxes)
        if 'masks' in b:
            of_masks = both / (either - both).clamp(min=1)
            # The boxes of a MaskFormer in MMDetection are all zero.
            overlaps = torch.minimum(overlaps, of_masks) if b.bboxes.any() else of_masks
        fits &= overlaps >= OVERLAP
    products = (fits * one[:, None] * other).nan_to_num()
    pairs = linear_sum_assignment(products.numpy(), maximize=True)
    return products[pairs].sum(), (one**2).sum(), (other**2).sum()
