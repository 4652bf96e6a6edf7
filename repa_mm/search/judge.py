"""What a model finds, in points of a metric, and intervals of differences over images."""

import copy
import io
import json
import os.path as osp
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import mmengine
import numpy as np
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.registry import DATASETS
from torch.utils.data import Dataset

from repa_mm.config import build_images
from repa_mm.export.agreement import dice, in_common
from repa_mm.files import write_text

#: Metrics to judge by, the first that an evaluator has, with the points of a 1 in them. In others
#: less may be better, or images cannot be resampled.
METRICS = {
    'coco/segm_mAP': 100, 'coco/bbox_mAP': 100, 'pascal_voc/mAP': 100, 'mIoU': 1, 'mDice': 1,
    'mFscore': 1, 'multi-label/mAP': 1, 'accuracy/top1': 1,
}  # fmt: skip
RESAMPLES = 400


@dataclass
class Score:
    """The metric of a model in points, and what each image contributes to it."""

    value: float
    records: Any


class Annotated:
    """Tests models by the config's own evaluator on the first images of its validation data.

    Args:
        cfg (Config): The config. Without validation data, its test data count.
        num_images (int): Number of images.
        subset (str): File to write the annotations of these images to, if the metric is of COCO
            and needs a file with them alone.

    Attributes:
        split (str): 'val' or 'test', whose data and evaluator of the config these are.
        options (dict): Overrides of a config that tests on these data, to test on the same images.

    Raises:
        ValueError: If the data are not there or have no annotations.
    """

    def __init__(self, cfg: Config, num_images: int, subset: str) -> None:
        is_val = cfg.get('val_dataloader') and cfg.get('val_evaluator')
        self.split = split = 'val' if is_val else 'test'
        if not (cfg.get(f'{split}_dataloader') and cfg.get(f'{split}_evaluator')):
            raise ValueError(
                'the config has no validation data with an evaluator: give a folder of images '
                '(--images), to compare with what the original model finds'
            )
        dataset, evaluator = (
            copy.deepcopy(cfg[f'{split}_{name}']) for name in ('dataloader', 'evaluator')
        )
        self.options: dict = {}
        try:
            with redirect_stdout(io.StringIO()):
                self.dataset = DATASETS.build(dataset.dataset)
                self.num_images = min(num_images, len(self.dataset))
                self.options, evaluator = _first_images(self, evaluator, subset)
                self.evaluator = Evaluator(evaluator)
        except FileNotFoundError as error:
            raise ValueError(
                f"the config's validation data are not there ({error}): change the config, or give "
                'a folder of images (--images), to compare with what the original model finds'
            ) from error
        self.evaluator.dataset_meta = self.dataset.metainfo
        self.name = ''
        self.how = ''
        self._metric: BaseMetric | None = None

    def __call__(self, model: nn.Module) -> Score:
        """Test a model, which has ``test_step``."""
        with torch.no_grad():
            for i in range(self.num_images):
                data = pseudo_collate([self.dataset[i]])
                self.evaluator.process(data_samples=model.test_step(data), data_batch=data)
        found = {}
        with redirect_stdout(io.StringIO()):
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
            value, self._metric, records = found[self.name]
            if self.name in ('coco/segm_mAP', 'coco/bbox_mAP'):
                records = coco_records(self._metric, records, self.name[5:9])
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
        if self.name in ('coco/segm_mAP', 'coco/bbox_mAP'):
            self.how = 'paired bootstrap over images'
            return bootstrap(coco_ap, score.records, stock.records, self.num_images)

        def compute(results: list) -> float:
            with redirect_stdout(io.StringIO()):
                found = self._metric.compute_metrics(results)
            # A metric gives its names without its prefix.
            value = found.get(self.name, found.get(self.name.split('/')[-1]))
            return METRICS[self.name] * float(value)

        if self.name == 'accuracy/top1' and not same:
            self.how = "Agresti and Min's interval for pairs"
            return paired([[compute([one]) > 0 for one in x.records] for x in (score, stock)])

        def weighted(results: list, weights: np.ndarray) -> float:
            return compute([r for r, w in zip(results, weights) for _ in range(int(w))])

        self.how = 'paired bootstrap over images'
        return bootstrap(weighted, score.records, stock.records, self.num_images)


class Agreement:
    """Compares models with what the original finds in images without annotations, in percent.

    Args:
        cfg (Config): The config, with the test pipeline.
        num_images (int): Number of images.
        folder (str): The folder of the images.
    """

    options: dict = {}
    name, how = 'agreement', 'bootstrap over images'

    def __init__(self, cfg: Config, num_images: int, folder: str) -> None:
        self.dataset: Dataset = build_images(cfg, 'test', folder)
        self.num_images = min(num_images, len(self.dataset))
        self.expected: list | None = None

    def __call__(self, model: nn.Module) -> Score:
        """Compare a model with the first model that was given."""
        with torch.no_grad():
            data = (pseudo_collate([self.dataset[i]]) for i in range(self.num_images))
            found = [model.test_step(batch)[0].cpu() for batch in data]
        self.expected = self.expected or found
        records = torch.stack([in_common(*pair) for pair in zip(found, self.expected)])
        if records[:, 2].sum() < 1:
            raise ValueError(
                f'the model finds next to nothing in the {self.num_images} images of the folder: '
                'give images with something to find'
            )
        return Score(100 * dice(records), records)

    def difference(
        self, score: Score, stock: Score, same: bool = False
    ) -> tuple[float, float, float]:
        """Return the difference in points, and its 95 % interval over images."""

        def weighted(records: torch.Tensor, weights: np.ndarray) -> float:
            return 100 * dice(records[np.repeat(np.arange(len(records)), weights)])

        return bootstrap(weighted, score.records, stock.records, self.num_images)


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


def _first_images(judge: Annotated, evaluator: Any, subset: str) -> tuple[dict, Any]:
    """Let COCO's metric count the annotations of the tested images alone."""
    whole = judge.num_images == len(judge.dataset)
    evaluators = evaluator if isinstance(evaluator, (list, tuple)) else [evaluator]
    of_coco = {
        i: e for i, e in enumerate(evaluators)
        if e['type'].endswith('CocoMetric') and e.get('ann_file')
    }  # fmt: skip
    if not of_coco:
        return {} if whole else {'test_dataloader.dataset.indices': judge.num_images}, evaluator
    ids = {judge.dataset.get_data_info(i)['img_id'] for i in range(judge.num_images)}
    path, options = osp.abspath(subset), {'test_dataloader.dataset.ann_file': osp.abspath(subset)}
    for i, one in of_coco.items():
        content = mmengine.load(one.ann_file)
        if ids == {image['id'] for image in content['images']}:
            return {}, evaluator
        content['images'] = [image for image in content['images'] if image['id'] in ids]
        content['annotations'] = [a for a in content['annotations'] if a['image_id'] in ids]
        one.ann_file = path
        key = 'test_evaluator' if evaluators[0] is evaluator else f'test_evaluator.{i}'
        options[f'{key}.ann_file'] = path
    write_text(path, json.dumps(content))
    return options, evaluator


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


def coco_ap(records: list[tuple], weights: np.ndarray) -> float:
    """Compute COCO's AP in points, with weights of the images (images, )."""
    recalls, values = np.linspace(0, 1, 101), []
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
        for row, one in zip(true / total, precision):
            values.append(one[np.searchsorted(row, recalls)].mean())
    return 100 * float(np.mean(values)) if values else float('nan')
