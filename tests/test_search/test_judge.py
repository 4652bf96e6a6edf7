"""Metrics over weighted images are those of the codebase on images that are there as often."""

import json
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmdet.evaluation import CocoMetric
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.registry import DATASETS, METRICS, init_default_scope
from mmengine.structures import BaseDataElement, InstanceData, PixelData
from mmpretrain.structures import DataSample
from torch.utils.data import Dataset

from repa_mm.search.judge import Agreement, Annotated, Judge, subset
from repa_mm.search.precision import coco_records

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


def write_coco(file, images, size):
    """Write the boxes (N, 4) and labels of images as annotations of COCO."""
    content = dict(images=[], annotations=[], categories=[dict(id=i, name=str(i)) for i in (0, 1)])
    for i, (boxes, labels) in enumerate(images):
        content['images'].append(dict(id=i, file_name=f'{i}.png', width=size, height=size))
        for (left, top, right, bottom), label in zip(boxes, labels):
            box = [left, top, right - left, bottom - top]
            one = dict(id=len(content['annotations']) + 1, image_id=i, category_id=int(label))
            content['annotations'].append(dict(one, bbox=box, area=box[2] * box[3], iscrowd=0))
    file.write_text(json.dumps(content, default=int))


def tensors(**arrays):
    return {key: torch.tensor(value) for key, value in arrays.items()}


def coco_metric(images, folder):
    """MMDetection's metric of COCO and its results for images."""
    write_coco(folder / 'all.json', [image[:2] for image in images], 100)
    metric = CocoMetric(ann_file=str(folder / 'all.json'))
    metric.dataset_meta = dict(classes=('0', '1'))
    for i, (_, _, found, guesses, scores) in enumerate(images):
        found = tensors(bboxes=found, labels=guesses, scores=scores)
        metric.process({}, [dict(img_id=i, ori_shape=(100, 100), pred_instances=found)])
    return metric, list(metric.results)


def test_precision_of_weighted_images(tmp_path):
    """In a second instead of minutes: MMDetection would match the boxes anew 800 times."""
    values, images = [], list(scenes())
    for counts in np.ones(NUM, int), np.array([2, 0, 1, 3, 0, 1]):
        copies = [x for x, n in zip(images, counts) for _ in range(n)]
        metric, results = coco_metric(copies, tmp_path)
        values.append(metric.compute_metrics(list(results))['bbox_mAP'])
        if len(values) == 1:
            mean_ap, records = coco_records(metric, 'coco/bbox_mAP', results)
        # MMDetection rounds.
        assert mean_ap(records, counts) / 100 == pytest.approx(values[-1], abs=5.1e-4)
    assert 0.1 < values[0] < 0.9 and abs(values[0] - values[1]) > 5e-3


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


@pytest.mark.parametrize('name, points', [('mIoU', 1), ('coco/bbox_mAP', 100)])
def test_differences_are_in_points(name, points):
    judge = annotated(name, 40)
    rng = np.random.default_rng(0)
    stock = rng.normal(50, 5, 40) / points
    less = stock - rng.normal(1, 1, 40) / points
    with pytest.raises(RuntimeError):
        judge(Model(less[:7]))  # which leaves nothing behind
    scores = [judge(Model(values)) for values in (less, stock)]
    assert scores[1].value == pytest.approx(points * stock.mean())
    change, low, high = judge.difference(*scores)
    assert change == pytest.approx(scores[0].value - scores[1].value)
    assert low < change < high and 0.3 < high - low < 1.2
    assert judge.difference(scores[1], scores[1]) == (0, 0, 0)


@pytest.mark.parametrize('name', ['l1_distance', 'aAcc', 'val/bbox_mAP', 'coco/bbox_mAP_50'])
def test_a_metric_of_which_less_may_be_better_is_refused(name):
    with pytest.raises(ValueError, match=f'gives {name}, and none of coco/segm_mAP.*--images'):
        annotated(name, 4)(Model([0.1] * 4))


def hits_in(judge, hits):
    """The score of a model with a right label where `hits` are."""
    return judge(Model([100 * hit for hit in hits]))


def labels_in(judge, hits):
    """The score of a model with another label than the original where no `hits` are."""
    no, yes = (
        DataSample().set_pred_score(torch.eye(2)[i]).set_pred_label(torch.tensor([i]))
        for i in (0, 1)
    )
    if judge.expected is None:
        judge(Model([yes] * len(hits)))
    return judge(Model([yes if hit else no for hit in hits]))


@pytest.mark.parametrize('score_of', [hits_in, labels_in])
def test_labels_are_not_certain_of_a_few_images(score_of):
    """A bootstrap of unchanged labels would be."""
    judge = annotated('accuracy/top1', 100)
    if score_of is labels_in:
        judge = Agreement(Images(100), range(100))
    stock = score_of(judge, [1] * 100)
    change, low, high = judge.difference(stock, stock)
    if score_of is labels_in:  # which can only lose
        assert change == 0 and -6 < low < -4 and high == 0
    else:
        assert change == 0 and -4 < low < -2 and 2 < high < 4  # about three images
    assert judge.difference(stock, stock, same=True) == (0, 0, 0)
    change, low, high = judge.difference(score_of(judge, [0] * 4 + [1] * 96), stock)
    assert change == -4 and -12 < low < -7 and -2 < high < 1


@pytest.mark.parametrize(
    'number, better, worse', [(33, 0, 0.06), (100, 0, 0.03), (100, 0.02, 0.02), (400, 0.01, 0.02)]
)
def test_intervals_of_labels_have_the_true_difference_in_them(number, better, worse):
    judge, rng, inside = annotated('accuracy/top1', number), np.random.default_rng(0), 0

    @cache
    def interval(ups, downs):
        before = [0] * ups + [1] * (number - ups)
        after = [1] * (number - downs) + [0] * downs
        return judge.difference(hits_in(judge, after), hits_in(judge, before))

    for _ in range(300):
        ups, downs, _ = rng.multinomial(number, [better, worse, 1 - better - worse])
        _, low, high = interval(int(ups), int(downs))
        inside += low <= 100 * (better - worse) <= high
    assert inside >= 0.93 * 300


def test_agreement_of_resampled_images():
    """Images in which a model finds nothing of what the original finds move the interval."""

    def labels(value):
        sample = BaseDataElement()
        sample.pred_sem_seg = PixelData(data=torch.full((1, 4, 4), value))
        return sample

    judge = Agreement(Images(20), range(20))
    stock = judge(Model([labels(1)] * 20))
    change, low, high = judge.difference(judge(Model([labels(i % 2) for i in range(20)])), stock)
    assert stock.value == 100 and low < change < high < 0


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
    for i in range(number):
        cv2.imwrite(str(folder / f'{i}.png'), np.zeros((20, 20, 3), np.uint8))
    file = folder / 'all.json'
    write_coco(file, [([[1, 2, 6 + i % 9, 10]], [0]) for i in range(number)], 20)
    steps = dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', with_bbox=True)
    dataset = dict(
        type='CocoDataset', ann_file=str(file), data_prefix=dict(img=str(folder)), test_mode=True,
        metainfo=dict(classes=('0',)), pipeline=[*steps, dict(type='PackDetInputs')], **dataset,
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
        assert score.value == 100 and judge.difference(score, score) == (0, 0, 0)
        ProductMetric.factor = 0.5
        with pytest.raises(ValueError, match='ProductMetric computes another coco/bbox_mAP.*--im'):
            judge(Truth())


def test_images_without_an_object(tmp_path):
    cfg = detection(tmp_path)
    judge = Annotated(cfg, 5, str(tmp_path / 'five.json'))
    found = dict(
        bboxes=torch.tensor([[1.0, 2, 8, 9]]), scores=torch.ones(1), labels=torch.zeros(1).long()
    )
    write_coco(Path(judge.config['test_evaluator'][0].ann_file), [([], [])] * 12, 20)
    samples = [DetDataSample(pred_instances=InstanceData(**found)) for _ in range(5)]
    for index, sample in zip(judge.indices, samples):
        sample.set_metainfo(dict(img_id=index, ori_shape=(20, 20)))
    with pytest.raises(ValueError, match='no object in the images.*--images'):
        judge(Model(samples))


@contextmanager
def registered(registry, kind):
    registry.register_module(module=kind)
    yield
    del registry.module_dict[kind.__name__]


def test_each_metric_keeps_its_own_annotations(tmp_path):
    cfg = detection(tmp_path)
    write_coco(tmp_path / 'two.json', [([[3, 3, 9, 9]], [0])] * 12, 20)
    second = dict(cfg.val_evaluator, ann_file=str(tmp_path / 'two.json'), prefix='second')
    cfg.val_evaluator = [cfg.val_evaluator, second]
    found = []
    for one in subset(cfg, 3, str(tmp_path / 'few.json'))[1]:
        content = json.loads(Path(one.ann_file).read_text())
        found.append([a['bbox'] for a in content['annotations']])
    assert found == [[[1, 2, 5 + i % 9, 8] for i in (0, 4, 8)], [[3, 3, 6, 6]] * 3]


@pytest.mark.parametrize(
    'given, expected',
    [(None, [0, 4, 8]), (6, [0, 2, 4]), (-6, [6, 8, 10]), ([11, 3, 7, 1], [11, 3, 7])],
)
def test_images_are_those_that_the_written_config_tests(tmp_path, given, expected):
    cfg = detection(tmp_path, **({} if given is None else dict(indices=given)))
    loader, evaluators, dataset, indices = subset(cfg, 3, str(tmp_path / 'few.json'))
    seen = [data['data_samples'][0].img_id for data in Judge(dataset, indices).images(3)]
    assert [dataset[i]['data_samples'].img_id for i in indices] == expected == seen
    assert [len(data['inputs']) for data in Judge(dataset, indices).images(2, 4)] == [4]  # of three
    tested = DATASETS.build(loader.dataset)
    assert [tested[i]['data_samples'].img_id for i in range(len(tested))] == expected
    with open(evaluators[0].ann_file) as file:
        assert sorted(expected) == [image['id'] for image in json.load(file)['images']]


def test_several_data_sets_are_refused(tmp_path):
    cfg = detection(tmp_path)
    one, evaluator = cfg.val_dataloader.dataset, cfg.val_evaluator
    cfg.val_dataloader.dataset = dict(type='ConcatDataset', datasets=[one, one])
    with pytest.raises(ValueError, match='ConcatDataset of.*--images'):
        subset(cfg, 3, str(tmp_path / 'few.json'))
    cfg.val_dataloader.dataset = one
    cfg.val_evaluator = dict(type='Evaluator', metrics=[evaluator])
    assert len(subset(cfg, 3, str(tmp_path / 'few.json'))[1]) == 1
