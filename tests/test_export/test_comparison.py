"""The agreement of two models, from what they find in images."""

import numpy as np
import pytest
import torch
from mmengine.structures import BaseDataElement, InstanceData, PixelData

from repa_mm.export import agreement, agreement_of, overlap


class Answers(torch.nn.Module):
    """Gives the same answer to every image."""

    def __init__(self, **sample):
        super().__init__()
        self.sample = BaseDataElement(**sample)

    def test_step(self, data):
        return [self.sample]


BOX, FAR, NEAR = [0, 0, 10, 10], [50, 50, 60, 60], [0, 0, 10, 9]


def objects(bboxes=(BOX, FAR), labels=(1, 2), scores=(0.9, 0.4), missing=None):
    """With masks of which so many rows are missing in the second one, or without masks."""
    found = InstanceData(bboxes=torch.tensor(bboxes, dtype=torch.float32).view(-1, 4))
    found.labels, found.scores = torch.tensor(labels).long(), torch.tensor(scores).float()
    if missing is not None:
        inside = torch.arange(800).reshape(2, 20, 20) % 3 == 0
        inside[1, :missing] = False
        found.masks = inside[: len(bboxes)]
    return Answers(pred_instances=found)


@pytest.mark.parametrize(
    'changes, expected',
    [
        (dict(), 1),
        (dict(bboxes=[FAR, BOX], labels=[2, 1], scores=[0.4, 0.9]), 1),  # whatever the order
        (dict(bboxes=[NEAR, FAR]), 1),
        (dict(labels=[2, 1]), 0),
        (dict(bboxes=[BOX], labels=[1], scores=[0.9]), 2 * 0.81 / (2 * 0.81 + 0.16)),
        (
            dict(bboxes=[BOX, BOX, FAR], labels=[1, 1, 2], scores=[0.9, 0.9, 0.4]),
            2 * 0.97 / (2 * 0.97 + 0.81),
        ),
        (dict(bboxes=[], labels=[], scores=[]), 0),
        (dict(scores=[0.9, np.nan]), np.nan),
        (dict(scores=[0.9, np.inf]), 0),
        (dict(bboxes=[BOX, [50, np.nan, 60, 60]]), 0.81 / (0.81 + 0.16)),
    ],
)
def test_agreement_of_objects(changes, expected):
    found = agreement(objects(), objects(**changes), [None] * 3)
    assert found == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    'changes, expected',
    [
        (dict(), 1),
        (dict(bboxes=[BOX, [50, 50, 60, 60.05]], scores=[0.9, 0.4005]), 1),
        (dict(bboxes=[BOX, [50, 50, 60, 61]]), 0.5),
        (dict(scores=[0.9, 0.5]), 0.5),
        (dict(scores=[np.nan, 0.4]), 0.5),
        (dict(labels=[1, 3]), 0.5),
        (dict(missing=5), 0.5),
        (dict(bboxes=[BOX], labels=[1], scores=[0.9]), 2 / 3),
        (dict(bboxes=[], labels=[], scores=[]), 0),
    ],
)
def test_strict_agreement_is_the_share_of_objects_with_a_counterpart(changes, expected):
    found = objects(**dict(dict(missing=0), **changes))
    assert agreement(objects(missing=0), found, [None], strict=True) == pytest.approx(expected)


def soft(probability):
    """With the same masks of bytes."""
    model = objects(missing=0)
    found = model.sample.pred_instances
    found.masks = (found.masks * 255 * probability).to(torch.uint8)
    return model


def label_map(**classes):
    """Zeros with rows of other classes."""
    data = torch.zeros(1, 20, 20, dtype=torch.long)
    for name, rows in classes.items():
        data[:, slice(*rows)] = int(name[1:])
    return Answers(pred_sem_seg=PixelData(data=data))


def segments(*, first=1001, second=3):
    """Two segments before nothing, which is 5."""
    maps = torch.full((1, 20, 20), 5)
    maps[:, :8], maps[:, 8:12, :9] = first, second
    return Answers(pred_panoptic_seg=PixelData(sem_seg=maps))


def classes(scores, *labels):
    return Answers(pred_score=torch.tensor(scores), pred_label=torch.tensor(labels).long())


NOTHING = segments(first=5, second=5)
SCORES = [0.9, 0.8, 0.2]


def test_images_with_other_classes():
    found = [overlap(m.sample, m.sample) for m in (label_map(_2999=(0, 2)), label_map())]
    assert agreement_of(found) == 1


@pytest.mark.parametrize(
    'model, other, strict, expected',
    [
        (label_map(_1=(2, 5)), label_map(_1=(2, 6)), True, 0.95),
        # Small classes count, too.
        (label_map(_3=(0, 2)), label_map(_3=(0, 2)), False, 1),
        (label_map(_3=(0, 2)), label_map(), False, 18 / 38),
        (label_map(_2999=(0, 5)), label_map(), False, 15 / 35),
        # Of panoptic maps it is that of segments, whatever the number of an object.
        (segments(), segments(first=2001), False, 1),
        (segments(), segments(second=5), False, 4 / 5),
        (segments(), NOTHING, False, 0),
        (segments(), segments(second=5), True, 0.91),
        (classes([0.6, 0.4], 0), classes([0.61, 0.39], 0), True, 0.99),
        (classes([0.6, 0.4], 0), classes([np.nan, 0.4], 0), True, np.nan),
        (classes([0.6, 0.4], 0), classes([np.nan, 0.4], 0), False, np.nan),
        # The least counts: that of labels beside scores, and of boxes beside masks.
        (classes([0.55, 0.45], 0), classes([0.45, 0.55], 1), False, 0),
        (objects(missing=0), objects([FAR, BOX], missing=0), False, 0),
        # Masks of nothing are equal; soft ones, which are bytes, differ from others.
        (objects(missing=20), objects(missing=20), False, 1),
        (soft(0.6), soft(0.6), False, 1),
        (soft(0.6), soft(0.2), False, 0),
        (soft(0.6), soft(0.6), True, 1),
        (soft(0.6), soft(1), True, 0),
        # The Dice coefficient of the sets of labels; 1 where neither has one.
        (classes(SCORES, 0, 1), classes(SCORES, 0, 1), False, 1),
        (classes(SCORES, 0, 1), classes(SCORES, 1), False, 2 / 3),
        (classes(SCORES), classes(SCORES), False, 1),
        (classes(SCORES, 1), classes(SCORES), False, 0),
    ],
)
def test_agreement(model, other, strict, expected):
    found = agreement(model, other, [None] * 3, strict)
    assert found == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize('strict', [False, True])
def test_nothing_to_find_is_no_agreement(strict):
    nothing = objects([], [], [])
    with pytest.raises(ValueError, match='finds next to nothing in the 2 images'):
        agreement(nothing, nothing, [None] * 2, strict)
    if not strict:
        with pytest.raises(ValueError, match='finds next to nothing'):
            agreement(NOTHING, NOTHING, [None])
