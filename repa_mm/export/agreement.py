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
    model: nn.Module, exported: nn.Module, batches: Sequence[dict], hopeless: float = 0.0
) -> float:
    """Measure whether an exported model finds what the model finds.

    Detections are compared by the Dice coefficient 2 Σ ab / (Σ a² + Σ b²) over all images, where a
    and b are the scores of one object. Objects are paired one to one if their labels are equal and
    the intersection over union of their boxes, and of their masks, is at least :data:`OVERLAP`; the
    counterpart of an object without a pair has the score 0. Segments of panoptic maps are objects
    with a score of 1; if there are instances, too, their coefficients are averaged. Label maps are
    compared by the Dice coefficient of the pixels of each class, on average over the classes that
    either has. For classifiers it is the coefficient of all scores, or the share of equal labels if
    that is less.

    Args:
        model (nn.Module): The model.
        exported (nn.Module): An :class:`~repa_mm.export.exported.ExportedModel`.
        batches (Sequence[dict]): From a data loader.
        hopeless (float): Stop below this agreement on the first :data:`FEW` batches. Defaults to 0.

    Returns:
        float: 1 if both find the same, 0 if they have nothing in common.

    Raises:
        ValueError: If both together find fewer than two objects with a score of 1.
    """
    parts = []
    for i, data in enumerate(batches, 1):
        outputs = (m.test_step(copy.deepcopy(data)) for m in (exported, model))
        parts += [in_common(*pair) for pair in zip(*outputs, strict=True)]
        if i == FEW and hopeless and dice(torch.stack(parts)) < hopeless:
            break
    if sum(part[1:3].sum() for part in parts) < 2:
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


def in_common(found: BaseDataElement, expected: BaseDataElement) -> torch.Tensor:
    """Return Σ ab, Σ a², Σ b² of the predictions for one image, and whether labels are equal.

    Returns:
        torch.Tensor: (4, classes), with NaN in the last row for detections and label maps.
    """
    parts = torch.stack(_sums(found, expected)).double()
    equal = parts.new_full((1, parts.shape[1]), torch.nan)
    if 'pred_score' in expected:
        equal[:] = float(found.pred_label == expected.pred_label)
    return torch.cat([parts, equal])


def _sums(found: BaseDataElement, expected: BaseDataElement) -> tuple:
    if 'pred_sem_seg' in expected:
        a, b = found.pred_sem_seg.data, expected.pred_sem_seg.data
        return tuple(x.flatten().bincount(minlength=MAX_CLASSES) for x in (a[a == b], a, b))
    if 'pred_score' in expected:
        a, b = found.pred_score, expected.pred_score
        return tuple(x.sum()[None] for x in (a * b, a * a, b * b))
    pairs = []
    if 'pred_instances' in expected:
        pairs.append((found.pred_instances, expected.pred_instances))
    if 'pred_panoptic_seg' in expected:
        maps = found.pred_panoptic_seg, expected.pred_panoptic_seg
        pairs.append([_segments(x.sem_seg) for x in maps])
    return tuple(torch.stack(x) for x in zip(*(_sums_of_objects(a, b) for a, b in pairs)))


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


def _sums_of_objects(a: InstanceData, b: InstanceData) -> tuple:
    overlaps = box_iou(a.bboxes, b.bboxes)
    if 'masks' in b:
        x, y = a.masks.flatten(1).float(), b.masks.flatten(1).float()
        both = x @ y.T
        of_masks = both / (x.sum(1)[:, None] + y.sum(1) - both).clamp(min=1)
        # The boxes of a MaskFormer in MMDetection are all zero.
        overlaps = torch.minimum(overlaps, of_masks) if b.bboxes.any() else of_masks
    fits = (overlaps >= OVERLAP) & (a.labels[:, None] == b.labels)
    products = (fits * a.scores[:, None] * b.scores).nan_to_num()
    pairs = linear_sum_assignment(products.numpy(), maximize=True)
    return tuple(x.sum() for x in (products[pairs], a.scores**2, b.scores**2))
