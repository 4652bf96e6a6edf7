"""Metrics over weighted images are those of the codebase on images that are there as often."""

import json

import numpy as np
import pytest
import torch
from mmengine.evaluator import Evaluator
from mmengine.structures import BaseDataElement, PixelData

from repa_mm.search import judge as judging
from repa_mm.search.judge import Annotated, Score, bootstrap, coco_ap, coco_records

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
    """A metric of the mean of images."""

    name = 'mIoU'

    def __init__(self):
        self.results = []

    def process(self, data_batch, data_samples):
        self.results += data_samples

    def compute_metrics(self, results):
        return {self.name.split('/')[-1]: sum(results) / len(results)}

    def evaluate(self, size):
        (value,), self.results = self.compute_metrics(self.results).values(), []
        return {self.name: value}


class Model:
    """A model whose outputs in the images are given."""

    def __init__(self, outputs):
        self.outputs = iter(outputs)

    def test_step(self, data):
        return [next(self.outputs)]


def annotated(name, number):
    judge = Annotated.__new__(Annotated)
    judge.name = judge.how = ''
    judge.num_images, judge.dataset = number, [dict(inputs=torch.ones(1))] * number
    judge.evaluator = Evaluator([Mean()])
    judge.evaluator.metrics[0].name = name
    return judge


@pytest.mark.parametrize('name, points', [('mIoU', 1), ('mDice', 1), ('pascal_voc/mAP', 100)])
def test_differences_are_in_points(name, points):
    judge = annotated(name, 40)
    rng = np.random.default_rng(0)
    stock = rng.normal(50, 5, 40) / points
    less = stock - rng.normal(1, 1, 40) / points
    scores = [judge(Model(values)) for values in (less, stock)]
    change, low, high = judge.difference(*scores)
    assert change == pytest.approx(scores[0].value - scores[1].value)
    assert low < change < high and 0.3 < high - low < 1.2
    assert judge.difference(scores[1], scores[1]) == (0, 0, 0)


@pytest.mark.parametrize('name', ['l1_distance', 'aAcc', 'val/bbox_mAP', 'coco/bbox_mAP_50'])
def test_a_metric_of_which_less_may_be_better_is_refused(name):
    with pytest.raises(ValueError, match=f'gives {name}, and none of coco/segm_mAP.*--images'):
        annotated(name, 4)(Model([0.1] * 4))


def test_accuracy_is_not_certain_of_a_few_images():
    judge = annotated('accuracy/top1', 100)
    stock = [100] * 90 + [0] * 10
    same, worse = judge(Model(stock)), judge(Model([0] * 4 + stock[4:]))
    change, low, high = judge.difference(same, same)
    assert change == 0 and -2.5 < low < -1.5 and 1.5 < high < 2.5  # about two images
    assert judge.difference(same, same, same=True) == (0, 0, 0)
    change, low, high = judge.difference(worse, same)
    assert change == -4 and low < -7 and -0.5 < high < 0.5
    # In many trials it has the true difference in it.
    rng, inside = np.random.default_rng(0), 0
    for _ in range(500):
        before = rng.uniform(size=100) < 0.9
        after = np.where(rng.uniform(size=100) < 0.02, ~before, before)
        _, low, high = judging.paired([after, before])
        inside += low <= 100 * 0.02 * (0.1 - 0.9) <= high
    assert inside >= 470


def test_agreement_of_resampled_images():
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
