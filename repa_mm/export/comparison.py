"""How far an exported model finds what the model finds."""

import copy
from collections.abc import Sequence

import torch
import torch.nn as nn
from mmengine.structures import BaseDataElement, InstanceData, PixelData
from torch.nn.utils.rnn import pad_sequence
from torchvision.ops import box_iou

#: Two objects are the same one from this intersection over union on.
MIN_IOU = 0.75

#: By the name of a field of the data sample: what both models have in an image, what the first has
#: and what the second has, a tensor (3, n) for n classes.
Overlap = dict[str, torch.Tensor]


def agreement(
    model: nn.Module, exported: nn.Module, batches: Sequence[dict], strict: bool = False
) -> float:
    """Measure whether an exported model finds what the model finds.

    Detections are compared by the Dice coefficient 2 Σ ab / (Σ a² + Σ b²) over all images, where a
    and b are the scores of one object, or 0. Objects are paired one to one if their labels are
    equal and their boxes and masks have an intersection over union of 0.75 at least. Segments of
    panoptic maps are objects with a score of 1. Label maps are compared by the Dice coefficient of
    each class's pixels, on average over the classes; classifiers by that of all scores, and that
    of the sets of labels. The least counts where a model has several of these results.

    Args:
        model (nn.Module): The model, on any device.
        exported (nn.Module): An :class:`~repa_mm.export.ExportedModel`.
        batches (Sequence[dict]): From a data loader.
        strict (bool): Accept rounding only. The agreement is then the share of objects that have a
            counterpart, with a score within 1e-3, a box within 0.1 pixels, and a mask that differs
            in less than 2 % of the box's area plus 4 pixels. For label maps and panoptic maps it is
            the share of equal pixels, for classifiers 1 minus the largest difference of a score, on
            average over the images. Defaults to False.

    Returns:
        float: 1 if both find the same, 0 if they have nothing in common.

    Raises:
        ValueError: If both together find fewer than two objects with a score of 1.
    """
    found = overlaps(model, exported, batches, strict)
    if num_found(found) < 2:
        raise ValueError(
            f'the model finds next to nothing in the {len(batches)} images to compare on: give '
            'images with something to find, or more images'
        )
    return agreement_of(found)


@torch.no_grad()
def overlaps(
    model: nn.Module, exported: nn.Module, batches: Sequence[dict], strict: bool = False
) -> list[Overlap]:
    """Return the overlap of each image of the batches, see :func:`agreement`."""
    found = []
    for data in batches:
        outputs = (m.test_step(copy.deepcopy(data)) for m in (exported, model))
        pairs = zip(*outputs, strict=True)  # the model may be on a GPU
        found += [overlap(a.cpu(), b.cpu(), strict) for a, b in pairs]
    return found


def overlap(found: BaseDataElement, expected: BaseDataElement, strict: bool = False) -> Overlap:
    """Return what the predictions for one image have in common, and what each has."""
    return {
        name: _rows(*compare(found.get(name), expected.get(name), strict))
        for name, compare in COMPARED.items()
        if name in expected
    }


def _rows(*values) -> torch.Tensor:
    """Stack three tensors (n, ), or numbers, to (3, n)."""
    return torch.stack([torch.as_tensor(x).double().reshape(-1) for x in values])


def agreement_of(found: Sequence[Overlap]) -> float:
    """Compute the agreement from the overlaps of images; 0 if nothing is found."""
    coefficients = []
    for name in found[0]:
        # Label maps of some images have fewer classes.
        both, first, second = pad_sequence([x[name].T for x in found]).sum(1).T
        has = first + second != 0
        if has.any():
            coefficients.append((2 * both / (first + second))[has].mean())
    return float(torch.stack(coefficients).min()) if coefficients else 0.0


def num_found(found: Sequence[Overlap]) -> float:
    """Return how many objects, pixels or labels two models find together in these images."""
    return float(sum(x[1:].sum() for one in found for x in one.values()))


def _label_maps(a: PixelData, b: PixelData, strict: bool) -> tuple:
    a, b = a.data.long(), b.data.long()  # those of binary segmentors are floats
    if strict:
        return _equal(a, b)
    number = int(max(a.max(), b.max())) + 1
    return tuple(x.flatten().bincount(minlength=number) for x in (a[a == b], a, b))


def _panoptic_maps(a: PixelData, b: PixelData, strict: bool) -> tuple:
    a, b = a.sem_seg, b.sem_seg
    return _equal(a, b) if strict else _objects(_segments(a), _segments(b), False)


def _scores(a: torch.Tensor, b: torch.Tensor, strict: bool) -> tuple:
    if strict:
        return 1 - (a - b).abs().max(), 1, 1
    return (a * b).sum(), (a * a).sum(), (b * b).sum()


def _labels(a: torch.Tensor, b: torch.Tensor, strict: bool) -> tuple:
    """Compare sets of labels, which are one or any number of labels; each image counts alike."""
    a, b = ({*x.flatten().tolist()} for x in (a, b))
    equal = 2 * len(a & b) / (len(a) + len(b)) if a or b else 1
    return equal, 1, 1


def _equal(a: torch.Tensor, b: torch.Tensor) -> tuple:
    return (a == b).sum(), a.numel(), a.numel()


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


def _objects(a: InstanceData, b: InstanceData, strict: bool) -> tuple:
    fits, one, other = a.labels[:, None] == b.labels, a.scores, b.scores
    if 'masks' in b:
        # Soft masks are bytes.
        x, y = (z.masks.flatten(1) / (1 if z.masks.dtype == torch.bool else 255) for z in (a, b))
        both, either = x @ y.T, x.square().sum(1)[:, None] + y.square().sum(1)
    if strict:
        fits &= (a.bboxes[:, None] - b.bboxes).abs().amax(-1) < 0.1
        fits &= (one[:, None] - other).abs() < 1e-3
        if 'masks' in b:
            areas = (a.bboxes[:, 2:] - a.bboxes[:, :2]).prod(1)
            fits &= either - 2 * both < 0.02 * areas[:, None] + 4
        one, other = torch.ones(len(a)), torch.ones(len(b))
    else:
        overlaps = box_iou(a.bboxes, b.bboxes)
        if 'masks' in b:
            of_masks = torch.where(either > 0, both / (either - both), 1.0)  # or both are empty
            # Segments have no boxes.
            overlaps = torch.minimum(overlaps, of_masks) if b.bboxes.any() else of_masks
        fits &= overlaps >= MIN_IOU
    products = (fits * one[:, None] * other).nan_to_num()
    from scipy.optimize import linear_sum_assignment  # which MMDetection brings along

    pairs = linear_sum_assignment(products.numpy(), maximize=True)
    return products[pairs].sum(), (one**2).sum(), (other**2).sum()


#: How the fields of a data sample are compared.
COMPARED = dict(
    pred_sem_seg=_label_maps,
    pred_panoptic_seg=_panoptic_maps,
    pred_instances=_objects,
    pred_score=_scores,
    pred_label=_labels,
)
