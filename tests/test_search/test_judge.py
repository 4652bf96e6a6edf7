"""Metrics over weighted images are those of the codebase on images that are there as often."""

import json
from contextlib import contextmanager
from functools import cache

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.registry import DATASETS, METRICS, init_default_scope
from mmengine.structures import BaseDataElement, InstanceData, PixelData
from torch.utils.data import Dataset

from repa_mm.search import judge as judging
from repa_mm.search.judge import Agreement, Annotated, Judge, bootstrap, subset
from repa_mm.search.precision import coco_records, mean_ap, voc_records

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
    found = mean_ap(records, np.ones(NUM, int))
    assert 0.2 < expected < 0.9 and abs(found / 100 - expected) < 5.1e-4
    weights = np.array([2, 0, 1, 3, 0, 1])
    metric, results = metric_of([x for x, w in zip(images, weights) for _ in range(w)], tmp_path)
    expected = metric.evaluate(len(results))['coco/bbox_mAP']
    assert abs(mean_ap(records, weights) / 100 - expected) < 5.1e-4
    assert abs(expected - found / 100) > 5e-3


def voc_metric_of(images, mode):
    """MMDetection's VOC metric and its results for images."""
    from mmdet.evaluation import VOCMetric

    metric = VOCMetric(iou_thrs=[0.5, 0.8], eval_mode=mode)
    metric.dataset_meta = dict(classes=('0', '1'))
    for boxes, labels, found, guesses, scores in images:
        whole, last = (
            dict(bboxes=torch.tensor(boxes[x]).float(), labels=torch.tensor(labels[x]))
            for x in (slice(0, None), slice(-1, None))
        )
        rest = {key: value[:-1] for key, value in whole.items()} if len(boxes) > 2 else whole
        ignored = last if len(boxes) > 2 else {key: value[:0] for key, value in whole.items()}
        found = dict(
            bboxes=torch.tensor(found), labels=torch.tensor(guesses), scores=torch.tensor(scores)
        )
        sample = dict(gt_instances=rest, ignored_instances=ignored, pred_instances=found)
        metric.process({}, [sample])
    return metric, list(metric.results)


@pytest.mark.parametrize('mode, points', [('11points', 11), ('area', None)])
def test_map_of_weighted_images(mode, points):
    """In a second instead of minutes: MMDetection would match the boxes anew 800 times."""
    pytest.importorskip('mmdet')
    images = list(scenes())
    metric, results = voc_metric_of(images, mode)
    records = voc_records(metric, results)
    weights = np.array([2, 0, 1, 3, 0, 1])
    for counts in (np.ones(NUM, int), weights):
        expected = metric.compute_metrics([r for r, w in zip(results, counts) for _ in range(w)])
        found = mean_ap(records, counts, points)
        assert 0.1 < expected['mAP'] < 0.9 and found / 100 == pytest.approx(expected['mAP'])


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


@METRICS.register_module()
class Mean(BaseMetric):
    """The mean of images under any name."""

    def __init__(self, name):
        prefix, _, self.key = name.rpartition('/')
        super().__init__(prefix=prefix or None)

    def process(self, data_batch, data_samples):
        self.results += data_samples

    def compute_metrics(self, results):
        return {self.key: sum(results) / len(results)}


@DATASETS.register_module()
class Images(Dataset):
    metainfo = {}

    def __init__(self, number):
        self.number = number

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        return dict(inputs=torch.ones(1))

    def get_data_info(self, index):
        return {}


class Model:
    """A model whose outputs in the images are given."""

    def __init__(self, outputs):
        self.outputs = iter(outputs)

    def test_step(self, data):
        return [next(self.outputs)]


def annotated(name, number):
    loader = dict(dataset=dict(type='Images', number=number))
    evaluator = dict(type='Mean', name=name)
    cfg = dict(default_scope='mmengine', val_dataloader=loader, val_evaluator=evaluator)
    return Annotated(Config(cfg), number, '')


@pytest.mark.parametrize('name, points', [('mIoU', 1), ('mDice', 1), ('multi-label/mAP', 1)])
def test_differences_are_in_points(name, points):
    judge = annotated(name, 40)
    rng = np.random.default_rng(0)
    stock = rng.normal(50, 5, 40) / points
    less = stock - rng.normal(1, 1, 40) / points
    scores = [judge(Model(values)) for values in (less, stock)]
    change, low, high, _ = judge.difference(*scores)
    assert change == pytest.approx(scores[0].value - scores[1].value)
    assert low < change < high and 0.3 < high - low < 1.2
    assert judge.difference(scores[1], scores[1])[:3] == (0, 0, 0)


@pytest.mark.parametrize('name', ['l1_distance', 'aAcc', 'val/bbox_mAP', 'coco/bbox_mAP_50'])
def test_a_metric_of_which_less_may_be_better_is_refused(name):
    with pytest.raises(ValueError, match=f'gives {name}, and none of coco/segm_mAP.*--images'):
        annotated(name, 4)(Model([0.1] * 4))


def test_accuracy_is_not_certain_of_a_few_images():
    judge = annotated('accuracy/top1', 100)
    stock = [100] * 90 + [0] * 10
    same, worse = judge(Model(stock)), judge(Model([0] * 4 + stock[4:]))
    change, low, high, method = judge.difference(same, same)
    assert method.startswith('Agresti')
    assert change == 0 and -2.5 < low < -1.5 and 1.5 < high < 2.5  # about two images
    assert judge.difference(same, same, same=True)[:3] == (0, 0, 0)
    change, low, high, _ = judge.difference(worse, same)
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

    judge = Agreement(Images(20), range(20))
    stock = judge(Model([labels(1)] * 20))
    change, low, high, _ = judge.difference(judge(Model([labels(i % 2) for i in range(20)])), stock)
    assert stock.value == 100 and low < change < high < 0


def labelled(*labels):
    """What a classifier finds in an image: one label, or several."""
    from mmpretrain.structures import DataSample

    score = torch.full((10,), 0.04)
    score[list(labels)] = 0.64
    return DataSample().set_pred_score(score).set_pred_label(torch.tensor(labels))


def test_agreement_of_labels_is_not_certain_of_a_few_images():
    def difference(changes, number, same=False):
        judge = Agreement(Images(number), range(number))
        stock = judge(Model([labelled(0)] * number))
        found = [labelled(*labels) for labels in changes] + [labelled(0)] * (number - len(changes))
        return judge.difference(judge(Model(found)), stock, same)[:3]

    assert difference([], 1) == pytest.approx((0, -97.5, 0))
    change, low, high = difference([], 33)
    assert change == high == 0 and low == pytest.approx(-10.6, abs=0.1)
    assert difference([], 33, same=True) == (0, 0, 0)
    change, low, high = difference([(1,), (2,)], 40)
    assert change == -5 and low == pytest.approx(-16.9, abs=0.1) and -1 < high < 0
    rng, exact = np.random.default_rng(0), cache(judging.clopper_pearson)
    for number, fraction in ((33, 0.03), (100, 0.01)):
        inside = 0
        for _ in range(500):
            _, low, high = exact(int(rng.binomial(number, fraction)), number)
            inside += low <= -100 * fraction <= high
        assert inside >= 475


class Truth:
    """A model that finds what is annotated."""

    def test_step(self, data):
        (sample,) = data['data_samples']
        truth = sample.gt_instances
        boxes = getattr(truth.bboxes, 'tensor', truth.bboxes)
        found = dict(bboxes=boxes, scores=torch.ones(len(boxes)), labels=truth.labels)
        sample.pred_instances = InstanceData(**found)
        return [sample]


def detection(folder, number=12, **dataset):
    """A config of a detector's validation data: images with one object each."""
    content = dict(images=[], annotations=[], categories=[dict(id=1, name='a')])
    for i in range(number):
        cv2.imwrite(str(folder / f'{i}.png'), np.zeros((20, 20, 3), np.uint8))
        content['images'].append(dict(id=i, file_name=f'{i}.png', width=20, height=20))
        box = dict(bbox=[1, 2, 5 + i % 9, 8], area=8 * (5 + i % 9), iscrowd=0)
        content['annotations'].append(dict(box, id=i + 1, image_id=i, category_id=1))
    file = folder / 'all.json'
    file.write_text(json.dumps(content))
    steps = dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', with_bbox=True)
    dataset = dict(
        type='CocoDataset', ann_file=str(file), data_prefix=dict(img=str(folder)), test_mode=True,
        metainfo=dict(classes=('a',)), pipeline=[*steps, dict(type='PackDetInputs')], **dataset,
    )  # fmt: skip
    sampler = dict(type='DefaultSampler', shuffle=False)
    loader = dict(batch_size=1, num_workers=0, sampler=sampler, dataset=dataset)
    init_default_scope('mmdet')
    return Config(
        dict(
            default_scope='mmdet', val_dataloader=loader,
            val_evaluator=dict(type='CocoMetric', ann_file=str(file), metric='bbox'),
        )
    )  # fmt: skip


def test_a_metric_of_ones_own_class(tmp_path):
    """Its class tells what it is, and what it computes is compared with what we compute."""
    CocoMetric = pytest.importorskip('mmdet.evaluation').CocoMetric  # noqa: N806

    class ProductMetric(CocoMetric):
        factor = 1

        def compute_metrics(self, results):
            found = super().compute_metrics(results)
            return {name: self.factor * value for name, value in found.items()}

    with registered(METRICS, ProductMetric):
        cfg = detection(tmp_path)
        cfg.val_evaluator.type = 'ProductMetric'
        judge = Annotated(cfg, 5, str(tmp_path / 'five.json'))
        score = judge(Truth())
        assert score.value == 100 and judge.difference(score, score)[:3] == (0, 0, 0)
        ProductMetric.factor = 0.5
        with pytest.raises(
            ValueError, match='ProductMetric computes another coco/bbox_mAP.*--imag'
        ):
            judge(Truth())


@contextmanager
def registered(registry, kind):
    registry.register_module(module=kind)
    yield
    del registry.module_dict[kind.__name__]


@pytest.mark.parametrize(
    'given, expected',
    [
        (None, [0, 4, 8]), (6, [0, 2, 4]), (-6, [6, 8, 10]), ([11, 3, 7, 1], [11, 3, 7]),
        ([2, 9], [2, 9]), (-40, [0, 4, 8]),
    ],
)  # fmt: skip
def test_images_are_those_that_the_written_config_tests(tmp_path, given, expected):
    pytest.importorskip('mmdet')
    cfg = detection(tmp_path, **({} if given is None else dict(indices=given)))
    loader, evaluators, dataset, indices = subset(cfg, 3, str(tmp_path / 'few.json'))
    seen = [data['data_samples'][0].img_id for data in Judge(dataset, indices).images(3)]
    assert [dataset[i]['data_samples'].img_id for i in indices] == expected == seen
    tested = DATASETS.build(loader.dataset)
    assert [tested[i]['data_samples'].img_id for i in range(len(tested))] == expected
    with open(evaluators[0].ann_file) as file:
        assert sorted(expected) == [image['id'] for image in json.load(file)['images']]


@pytest.mark.parametrize('what', ['loader', 'evaluator'])
def test_several_data_sets_are_refused(tmp_path, what):
    pytest.importorskip('mmdet')
    cfg = detection(tmp_path)
    one, evaluator = cfg.val_dataloader.dataset, cfg.val_evaluator
    if what == 'loader':
        cfg.val_dataloader.dataset = dict(type='ConcatDataset', datasets=[one, one])
    else:
        several = dict(type='MultiDatasetsEvaluator', metrics=[evaluator], dataset_prefixes=['a'])
        cfg.val_evaluator = several
    with pytest.raises(ValueError, match='ConcatDat|MultiDatasetsEv.*--images'):
        subset(cfg, 3, str(tmp_path / 'few.json'))
    cfg.val_dataloader.dataset = one
    cfg.val_evaluator = dict(type='Evaluator', metrics=[evaluator])
    assert len(subset(cfg, 3, str(tmp_path / 'few.json'))[1]) == 1
