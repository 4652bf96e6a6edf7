"""What a model finds, in points of a metric, and intervals of differences over images."""

import copy
import hashlib
import json
import os.path as osp
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mmengine
import numpy as np
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.registry import DATASETS
from scipy.stats import binomtest
from torch.utils.data import Dataset

from repa_mm.config import dataset_config
from repa_mm.export import agreement_of, num_found, overlap
from repa_mm.files import write_text
from repa_mm.opening import spread

#: Metrics to judge by, the first that an evaluator has, with the points of a 1 in them. In others
#: less may be better, or images cannot be resampled.
METRICS = {
    'coco/segm_mAP': 100, 'coco/bbox_mAP': 100, 'pascal_voc/mAP': 100, 'mIoU': 1, 'mDice': 1,
    'mFscore': 1, 'multi-label/mAP': 1, 'accuracy/top1': 1,
}  # fmt: skip
RESAMPLES = 400
#: A bootstrap over fewer images is too certain for a floor.
LEAST_IMAGES = 30


@dataclass
class Score:
    """The metric of a model in points, and what each image contributes to it."""

    value: float
    records: Any


class Judge:
    """Images to test on, spread over a data set.

    Args:
        dataset (Dataset): The data set.
        pool (Sequence[int]): Indices of the images to choose from.
        num_images (int): Number of images.

    Attributes:
        name (str): Name of the metric, '' before the first test.
        how (str): How the interval of the last difference was computed.
        mark (str): Hash of the images' names and sizes, and of their annotations.
        note (str): What a reader should know of the data, or ''.
        config (dict): Parts of a config that tests on these images, or {} without annotations.
    """

    name = how = note = ''

    def __init__(self, dataset: Dataset, pool: Sequence[int], num_images: int) -> None:
        self.dataset, self.pool, self.config = dataset, pool, {}
        self.indices = [pool[i] for i in spread(max(num_images, 1), len(pool))]
        self.num_images = len(self.indices)
        self.mark = hashed(files_of(dataset, self.indices))

    def images(self, number: int, batch_size: int = 1) -> list[dict]:
        """Return batches of images, spread over all images that may be tested on."""
        chosen = [self.pool[i] for i in spread(number * batch_size, len(self.pool))]
        starts = range(0, len(chosen) - batch_size + 1, batch_size) or [0]
        return [pseudo_collate([self.dataset[i] for i in chosen[s:][:batch_size]]) for s in starts]

    def batches(self) -> Iterator[dict]:
        """Yield the images to test on, one by one."""
        return (pseudo_collate([self.dataset[i]]) for i in self.indices)


class Annotated(Judge):
    """Tests models by the config's own evaluator on images of its validation data.

    Args:
        cfg (Config): The config. Without validation data, its test data count. Of several data sets
            it is the first.
        num_images (int): Number of images.
        subset (str): File to write the annotations of these images to, if the metric is of COCO
            and needs a file with them alone.

    Raises:
        ValueError: If the data are not there or have no annotations.
    """

    def __init__(self, cfg: Config, num_images: int, subset: str) -> None:
        is_val = cfg.get('val_dataloader') and cfg.get('val_evaluator')
        split = 'val' if is_val else 'test'
        if not (cfg.get(f'{split}_dataloader') and cfg.get(f'{split}_evaluator')):
            raise ValueError(
                'the config has no validation data with an evaluator: give a folder of images '
                '(--images), to compare with what the original model finds'
            )
        loader, evaluator = (
            copy.deepcopy(cfg[f'{split}_{name}']) for name in ('dataloader', 'evaluator')
        )
        given, loader.dataset = loader.dataset, copy.deepcopy(dataset_config(cfg, split))
        if isinstance(evaluator, dict) and 'metrics' in evaluator:
            several = evaluator.get('type', '').endswith('MultiDatasetsEvaluator')
            evaluator = evaluator.metrics[0] if several else evaluator.metrics
        dataset = DATASETS.build(loader.dataset)
        super().__init__(dataset, range(len(dataset)), num_images)
        if given.type != loader.dataset.type:
            self.note = f'tested on the first data set of a {given.type}'
        evaluators = evaluator if isinstance(evaluator, list) else [evaluator]
        infos = [dataset.get_data_info(i) for i in self.indices]
        paths = [e.get('ann_file') for e in evaluators] + [x.get('seg_map_path') for x in infos]
        self.mark = hashed(self.mark, infos, *(content_of(path) for path in paths if path))
        for one in evaluators:
            if one['type'].endswith('CocoMetric') and one.get('ann_file'):
                one.ann_file = _of_these_images(one.ann_file, infos, subset)
        self.evaluator = Evaluator(copy.deepcopy(evaluators))
        self.evaluator.dataset_meta = dataset.metainfo
        if self.num_images < len(dataset):
            loader.dataset.indices = self.indices
        self.config = dict(test_dataloader=loader, test_evaluator=evaluators)

    def __call__(self, model: nn.Module) -> Score:
        """Test a model, which has ``test_step``."""
        with torch.no_grad():
            for data in self.batches():
                self.evaluator.process(data_samples=model.test_step(data), data_batch=data)
        found = {}
        for metric in self.evaluator.metrics:
            results = list(metric.results)
            for name, value in metric.evaluate(self.num_images).items():
                found[name] = value, metric, results
        if self.name and self.name not in found:  # a model that finds nothing at all
            return Score(0.0, None)
        self.name = self.name or next((name for name in METRICS if name in found), '')
        if not self.name:
            raise ValueError(
                f"the config's evaluator gives {', '.join(found) or 'no metric'}, and none of "
                f'{", ".join(METRICS)}: give a folder of images (--images), to compare with '
                'what the original model finds'
            )
        value, metric, records = found[self.name]
        self._points = partial(weighted, metric, self.name)
        if self.name.startswith('coco/'):
            self._points, records = mean_ap, coco_records(metric, records, self.name[5:9])
        elif self.name == 'pascal_voc/mAP':
            records = voc_records(metric, records)
            points = 11 if metric.eval_mode == '11points' else None
            self._points = partial(mean_ap, points=points)
        return Score(METRICS[self.name] * float(value), records)

    def difference(
        self, score: Score, stock: Score, same: bool = False
    ) -> tuple[float, float, float]:
        """Return the difference in points, and its 95 % interval over images.

        Args:
            score (Score): Of the model.
            stock (Score): Of the original.
            same (bool): Both compute the same, except for rounding. Defaults to False.
        """
        if score.records is None:
            return (-stock.value,) * 3
        if self.name == 'accuracy/top1' and not same:
            self.how, one = "Agresti and Min's interval for pairs", np.ones(1, int)
            return paired([[self._points([x], one) > 0 for x in y.records] for y in (score, stock)])
        self.how = 'paired bootstrap over images'
        return bootstrap(self._points, score.records, stock.records, self.num_images)


class Agreement(Judge):
    """Compares models with what the original finds in images without annotations, in percent.

    Classifiers are compared by their labels, other models as in
    :func:`~repa_mm.export.agreement`. The arguments are those of :class:`Judge`.
    """

    name = 'agreement'
    expected: list | None = None

    def __call__(self, model: nn.Module) -> Score:
        """Compare a model with the first model that was given."""
        with torch.no_grad():
            found = [model.test_step(batch)[0].cpu() for batch in self.batches()]
        self.expected = self.expected or found
        records = [overlap(*pair) for pair in zip(found, self.expected)]
        if num_found(records) < 2:
            raise ValueError(
                f'the model finds next to nothing in the {self.num_images} images of the folder: '
                'give images with something to find'
            )
        return Score(self._weighted(records, np.ones(len(records), int)), records)

    def difference(
        self, score: Score, stock: Score, same: bool = False
    ) -> tuple[float, float, float]:
        """Return the difference in points, and its 95 % interval, see :class:`Annotated`."""
        if not same and 'pred_label' in score.records[0]:
            self.how = "Clopper and Pearson's interval"
            return exact(sum(x['pred_label'][0].item() < 1 for x in score.records), self.num_images)
        self.how = 'bootstrap over images'
        return bootstrap(self._weighted, score.records, stock.records, self.num_images)

    @staticmethod
    def _weighted(records: list, weights: np.ndarray) -> float:
        records = [records[i] for i in np.repeat(np.arange(len(records)), weights)]
        if 'pred_label' in records[0]:
            return 100 * float(np.mean([x['pred_label'][0].item() == 1 for x in records]))
        return 100 * agreement_of(records)


def files_of(dataset: Dataset, indices: Sequence[int]) -> list[tuple]:
    """Return names and sizes of a data set's images."""
    paths = [dataset.get_data_info(i).get('img_path', '') for i in indices]
    return [(path, osp.getsize(path) if osp.isfile(path) else 0) for path in paths]


def content_of(path: str) -> bytes | str:
    """Return the bytes of a file, or the path if it is none, such as a URL."""
    if not osp.isfile(path):
        return path
    with open(path, 'rb') as file:
        return file.read()


def hashed(*values: Any) -> str:
    """Return a hash of values of which JSON can be made, or of the bytes among them."""
    found = hashlib.sha256()
    for value in values:
        if not isinstance(value, bytes):
            value = json.dumps(value, sort_keys=True, default=_plain).encode()
        found.update(value)
    return found.hexdigest()


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, 'tolist') else str(value)


def _of_these_images(ann_file: str, infos: Sequence[dict], subset: str) -> str:
    """Return a file of COCO with the annotations of these images alone, which is written."""
    ids, content = {info['img_id'] for info in infos}, mmengine.load(ann_file)
    if ids == {image['id'] for image in content['images']}:
        return ann_file
    content['images'] = [image for image in content['images'] if image['id'] in ids]
    content['annotations'] = [a for a in content['annotations'] if a['image_id'] in ids]
    write_text(subset, json.dumps(content))
    return osp.abspath(subset)


def weighted(metric: BaseMetric, name: str, results: list, weights: np.ndarray) -> float:
    """Compute a metric in points from its results, with weights of the images (images, )."""
    found = metric.compute_metrics([r for r, w in zip(results, weights) for _ in range(int(w))])
    # A metric gives its names without its prefix.
    return METRICS[name] * float(found.get(name, found.get(name.split('/')[-1])))


def paired(hits: Sequence[Sequence[bool]]) -> tuple[float, float, float]:
    """Compute the difference of two accuracies on the same images and its 95 % interval, in points.

    A bootstrap would be certain of images that no model has changed. Half an image is added to each
    of the four cases (Agresti and Min, Statistics in Medicine 24, 2005).

    Args:
        hits (Sequence): For each image whether the model is right, and whether the original is.
    """
    number = len(hits[0])
    change = sum(hits[0]) - sum(hits[1])
    unequal = sum(a != b for a, b in zip(*hits)) + 1
    middle = change / (number + 2)
    half = 1.96 * (unequal - change**2 / (number + 2)) ** 0.5 / (number + 2)
    return 100 * change / number, 100 * (middle - half), 100 * (middle + half)


def exact(changed: int, number: int) -> tuple[float, float, float]:
    """Compute the loss by images with another label, and its exact 95 % interval, in points.

    Args:
        changed (int): Number of images whose label changed.
        number (int): Number of images.
    """
    low, high = binomtest(changed, number).proportion_ci()
    return -100 * changed / number, -100 * high, -100 * low


def bootstrap(
    metric: Callable, records: Any, stock: Any, num_images: int
) -> tuple[float, float, float]:
    """Compute a difference and its 95 % interval by a paired bootstrap over images.

    Args:
        metric (Callable): Maps records and the weights of images (num_images, ) to points.
        records: Those of the model.
        stock: Those of the model to compare with.
        num_images (int): Number of images.
    """
    rng, ones = np.random.default_rng(0), np.ones(num_images, int)
    weights = rng.multinomial(num_images, ones / num_images, RESAMPLES)
    changes = [metric(records, w) - metric(stock, w) for w in weights]
    low, high = np.nanpercentile(changes, [2.5, 97.5])
    return metric(records, ones) - metric(stock, ones), float(low), float(high)


def coco_records(metric: BaseMetric, results: list, iou_type: str) -> list[tuple]:
    """Match the detections of a tested model with COCO's annotations, once.

    Args:
        metric (BaseMetric): MMDetection's ``CocoMetric`` after an evaluation.
        results (list): Its results, one for each image.
        iou_type (str): 'bbox' or 'segm'.

    Returns:
        list[tuple]: For each category, of D detections in descending order of their scores: the
        index of their image (D, ), whether they match an object and whether they are ignored, for
        each threshold (T, D); and the number of objects in each image (images, ).
    """
    from mmdet.datasets.api_wrappers import COCOeval

    with tempfile.TemporaryDirectory() as folder:
        files = metric.results2json([found for _, found in results], osp.join(folder, 'found'))
        found = mmengine.load(files[iou_type])
    if iou_type == 'segm':  # the areas are those of the masks
        for one in found:
            one.pop('bbox')
    truth = metric._coco_api
    ev = COCOeval(truth, truth.loadRes(found), iou_type)
    ev.params.catIds, ev.params.imgIds = metric.cat_ids, [gt['img_id'] for gt, _ in results]
    ev.params.maxDets, ev.params.iouThrs = [100], metric.iou_thrs
    ev.params.areaRng, ev.params.areaRngLbl = ev.params.areaRng[:1], ['all']
    ev.evaluate()
    order = {image: i for i, image in enumerate(gt['img_id'] for gt, _ in results)}
    records, number = [], len(order)
    for k in range(len(metric.cat_ids)):
        rows = [row for row in ev.evalImgs[k * number : (k + 1) * number] if row]
        objects = np.zeros(number, int)
        for row in rows:
            objects[order[row['image_id']]] = np.sum(~np.asarray(row['gtIgnore'], bool))
        none = [np.zeros((len(metric.iou_thrs), 0), bool)]
        scores = np.concatenate([[], *(row['dtScores'] for row in rows)])
        images = np.concatenate(
            [np.zeros(0, int), *(np.full(len(r['dtScores']), order[r['image_id']]) for r in rows)]
        )
        hits = np.concatenate(none + [np.asarray(r['dtMatches']) > 0 for r in rows], 1)
        ignored = np.concatenate(none + [np.asarray(r['dtIgnore'], bool) for r in rows], 1)
        by = np.argsort(-scores, kind='stable')
        records.append((images[by], hits[:, by], ignored[:, by], objects))
    return records


def voc_records(metric: BaseMetric, results: list) -> list[tuple]:
    """Match detections as :func:`coco_records`, for MMDetection's ``VOCMetric``.

    The metric itself matches anew at each evaluation, by processes that it starts.
    """
    from mmdet.evaluation.functional.mean_ap import get_cls_results, tpfp_default

    truth, found = zip(*results)
    records = []
    for k in range(len(found[0])):
        boxes, objects, ignored = get_cls_results(found, truth, k)
        matches = [
            [
                tpfp_default(*one, iou_thr=thr, use_legacy_coordinate=True)
                for one in zip(boxes, objects, ignored)
            ]
            for thr in metric.iou_thrs
        ]
        true, false = (
            np.stack([np.concatenate([m[i][0] for m in row]) > 0 for row in matches])
            for i in (0, 1)
        )
        images = np.repeat(np.arange(len(boxes)), [len(x) for x in boxes])
        by = np.argsort(-np.concatenate(boxes)[:, -1], kind='stable')
        number = np.array([len(x) for x in objects])
        records.append((images[by], true[:, by], ~(true | false)[:, by], number))
    return records


def mean_ap(records: list[tuple], weights: np.ndarray, points: int | None = 101) -> float:
    """Compute a mean average precision in points, with weights of the images (images, ).

    Args:
        records (list[tuple]): From :func:`coco_records` or :func:`voc_records`.
        weights (np.ndarray): How often each image is there.
        points (int, optional): Number of recalls to average the precision over: 101 for COCO, 11
            for VOC; None takes the area below the curve.
    """
    values = []
    for images, hits, ignored, objects in records:
        total = objects @ weights
        if not total:
            continue
        count = weights[images]
        true = np.cumsum(hits * ~ignored * count, 1)
        false = np.cumsum(~hits * ~ignored * count, 1)
        precision = true / np.maximum(true + false, np.spacing(1))
        precision = np.maximum.accumulate(precision[:, ::-1], 1)[:, ::-1]
        precision = np.pad(precision, ((0, 0), (0, 1)))  # a recall that is not reached
        for recall, one in zip(true / total, precision):
            if points is None:
                values.append(np.diff(recall, prepend=0) @ one[:-1])
            else:
                values.append(one[np.searchsorted(recall, np.linspace(0, 1, points))].mean())
    return 100 * float(np.mean(values)) if values else float('nan')
