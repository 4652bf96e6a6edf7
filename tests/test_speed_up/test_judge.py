"""Metrics over weighted images are those of the codebase on images that are there as often."""

import json

import numpy as np
import pytest
import torch
from mmengine.structures import BaseDataElement, PixelData

from repa_mm.speed_up import judge as judging
from repa_mm.speed_up.judge import Annotated, Score, bootstrap, coco_ap, coco_records

NUM = 6


def scenes(seed=0):
    """For each image, boxes and labels of objects, and boxes, labels and scores of detections."""
    rng = np.random.default_rng(seed)
    for _ in range(NUM):
        n = rng.integers(1, 5)
        corner, size = rng.integers(0, 60, (n, 2)), rng.integers(10, 40, (n, 2))
        boxes, labels = np.concatenate([corner, corner + size], 1), rng.integers(0, 2, n)
        found = np.concatenate([boxes + rng.normal(0, 2, boxes.shape), rng.uniform(0, 99, (2, 4))])
        found[:, 2:] = np.maximum(found[:, 2:], found[:, :2] + 1)
        guesses = np.concatenate([labels, rng.integers(0, 2, 2)])
        yield boxes, labels, found, guesses, rng.uniform(0, 1, n + 2)


def metric_of(images, folder):
    """MMDetection's metric and its results for images."""
    from mmdet.evaluation import CocoMetric

    content = dict(images=[], annotations=[], categories=[dict(id=i, name=str(i)) for i in (0, 1)])
    samples = []
    for i, (boxes, labels, found, guesses, scores) in enumerate(images):
        content['images'].append(dict(id=i, width=100, height=100))
        for box, label in zip(boxes.tolist(), labels.tolist()):
            width, height = box[2] - box[0], box[3] - box[1]
            content['annotations'].append(
                dict(
                    id=len(content['annotations']) + 1, image_id=i, category_id=label, iscrowd=0,
                    bbox=[box[0], box[1], width, height], area=width * height,
                )
            )  # fmt: skip
        found = dict(
            bboxes=torch.tensor(found), labels=torch.tensor(guesses), scores=torch.tensor(scores)
        )
        samples.append(dict(img_id=i, ori_shape=(100, 100), pred_instances=found))
    file = folder / f'{len(samples)}.json'
    file.write_text(json.dumps(content))
    metric = CocoMetric(ann_file=str(file))
    metric.dataset_meta = dict(classes=('0', '1'))
    metric.process({}, samples)
    return metric, list(metric.results)


def test_ap_of_weighted_images(tmp_path):
    pytest.importorskip('mmdet')
    images = list(scenes())
    metric, results = metric_of(images, tmp_path)
    expected = metric.evaluate(NUM)['coco/bbox_mAP']
    records = coco_records(metric, results, 'bbox')
    found = coco_ap(records, np.ones(NUM, int))
    assert 0.2 < expected < 0.9 and abs(found / 100 - expected) < 5.1e-4
    weights = np.array([2, 0, 1, 3, 0, 1])
    metric, results = metric_of([x for x, w in zip(images, weights) for _ in range(w)], tmp_path)
    expected = metric.evaluate(len(results))['coco/bbox_mAP']
    assert abs(coco_ap(records, weights) / 100 - expected) < 5.1e-4
    assert abs(expected - found / 100) > 5e-3


def test_the_bootstrap_is_paired():
    def mean(values, weights):
        return float(values @ weights / weights.sum())

    rng = np.random.default_rng(0)
    stock = rng.normal(50, 20, 400)
    change, low, high = bootstrap(mean, stock - 1 + rng.normal(0, 0.1, 400), stock, 400)
    # By itself each mean is known to 2 points.
    assert low < change < high and abs(change + 1) < 0.05 and high - low < 0.05
    change, low, high = bootstrap(mean, stock + rng.normal(0, 20, 400), stock, 400)
    assert 3 < high - low < 5


class Mean:
    """A metric of the mean; or of images that must not be there twice."""

    def __init__(self, sums):
        self.sums = sums

    def compute_metrics(self, results):
        return dict(mean=sum(results) / (10 if self.sums else len(results)))


@pytest.mark.parametrize('sums, how', [(False, 'paired bootstrap'), (True, 'disjoint parts')])
def test_a_metric_that_cannot_be_resampled_is_compared_on_parts(sums, how):
    judge = Annotated.__new__(Annotated)
    judge.name, judge.num_images, judge._metric = 'any/mean', 40, Mean(sums)
    rng = np.random.default_rng(0)
    stock = rng.normal(50, 5, 40).tolist()
    less = [x - 1 + rng.normal(0, 1) for x in stock]
    change, low, high = judge.difference(Score(0, less), Score(0, stock))
    assert how in judge.how
    assert low < change < high
    assert judge.difference(Score(0, stock), Score(0, stock)) == (0, 0, 0)


def test_agreement_of_resampled_images(monkeypatch):
    """Images in which a model finds nothing of what the original finds move the interval."""

    def labels(value):
        sample = BaseDataElement()
        sample.pred_sem_seg = PixelData(data=torch.full((1, 4, 4), value))
        return sample

    parts = [judging.in_common(labels(i % 2), labels(1)) for i in range(20)]
    same = [judging.in_common(labels(1), labels(1)) for i in range(20)]
    judge = judging.Agreement.__new__(judging.Agreement)
    judge.num_images = 20
    scores = [Score(100 * judging.dice(torch.stack(p)), torch.stack(p)) for p in (parts, same)]
    change, low, high = judge.difference(*scores)
    assert scores[1].value == 100 and low < change < high < 0
