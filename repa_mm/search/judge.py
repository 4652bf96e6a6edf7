"""What a model finds, in points of a metric, and intervals of differences over images."""

import copy
import json
import os.path as osp
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import mmengine
import numpy as np
import torch
import torch.nn as nn
from mmengine.config import Config, ConfigDict
from mmengine.dataset import pseudo_collate
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.registry import DATASETS, EVALUATOR, Registry
from mmengine.registry import METRICS as REGISTRY
from scipy.stats import binomtest
from torch.utils.data import Dataset

from repa_mm.apis.images import evenly
from repa_mm.export import agreement_of, num_found, overlap
from repa_mm.io.files import write_text
from repa_mm.search.precision import coco_records, mean_ap, voc_records
from repa_mm.search.record import content_of, hashed

#: Metrics to judge by, the first that an evaluator has, with the points of a 1 in them. In others
#: less may be better, or images cannot be resampled.
METRICS = {
    'coco/segm_mAP': 100, 'coco/bbox_mAP': 100, 'pascal_voc/mAP': 100, 'mIoU': 1, 'mDice': 1,
    'mFscore': 1, 'multi-label/mAP': 1, 'accuracy/top1': 1,
}  # fmt: skip
RESAMPLES = 400
#: With fewer images, the bootstrap's interval is too narrow to guarantee a largest loss.
LEAST_IMAGES = 30
INSTEAD = 'give a folder of images (--images), to compare with what the original model finds'


class Score(NamedTuple):
    """The metric of a model in points, and what each image contributes to it."""

    value: float
    records: Any


class Judge:
    """Images to test on.

    Its kinds are called with a model, for a :class:`Score`. ``difference(score, stock, same)``
    returns the difference of two in points, the bounds of its 95 % interval over images, and the
    method of the interval. ``same`` says that both models are equal except for rounding.

    Args:
        dataset (Dataset): The data set.
        indices (Sequence[int]): Indices of the images.

    Attributes:
        name (str): Name of the metric, '' before the first test.
        mark (str): Hash of the images' names and sizes, and of their annotations.
        config (dict): Parts of a config that tests on these images, or {} without annotations.
    """

    name = ''

    def __init__(self, dataset: Dataset, indices: Sequence[int]) -> None:
        self.dataset, self.indices, self.config = dataset, indices, {}
        self.num_images = len(indices)
        self.mark = hashed(files_of(dataset, indices))

    def images(self, number: int, batch_size: int = 1) -> list[dict]:
        """Return batches of images, spread over those to test on."""
        chosen = [self.indices[i] for i in evenly(number * batch_size, self.num_images)]
        starts = range(0, len(chosen) - batch_size + 1, batch_size) or [0]
        return [pseudo_collate([self.dataset[i] for i in chosen[s:][:batch_size]]) for s in starts]

    def predictions(self, model: nn.Module):
        """Yield each image, as a batch, and what a model with ``test_step`` finds in it."""
        with torch.no_grad():
            for i in self.indices:
                data = pseudo_collate([self.dataset[i]])
                yield data, model.test_step(data)


class Annotated(Judge):
    """Tests models by the config's own evaluator on images of its data, see :func:`subset`."""

    def __init__(self, cfg: Config, num_images: int, ann_file: str) -> None:
        loader, evaluators, dataset, indices = subset(cfg, num_images, ann_file)
        super().__init__(dataset, indices)
        self.config = dict(test_dataloader=loader, test_evaluator=evaluators)
        infos = [dataset.get_data_info(i) for i in indices]
        paths = [e.get('ann_file') for e in evaluators] + [x.get('seg_map_path') for x in infos]
        self.mark = hashed(self.mark, infos, *(content_of(path) for path in paths if path))
        self.evaluator = Evaluator(copy.deepcopy(evaluators))
        self.evaluator.dataset_meta = dataset.metainfo

    def __call__(self, model: nn.Module) -> Score:
        """Test a model."""
        found = self._evaluate(model)
        if not self.name:
            self.name = next((name for name in METRICS if name in found), '')
            if not self.name:
                raise ValueError(
                    f"the config's evaluator gives {', '.join(found) or 'no metric'}, and none of "
                    f'{", ".join(METRICS)}: {INSTEAD}'
                )
        if self.name not in found:  # a model that finds nothing at all
            return Score(0.0, None)
        value, metric, results = found[self.name]
        self._points, records = resampled(metric, self.name, results)
        # A metric of one's own class may compute something else than what is resampled.
        if abs(self._points(records, np.ones(self.num_images, int)) - value) > 0.1:
            raise ValueError(
                f'{type(metric).__name__} computes another {self.name} than MMDetection: {INSTEAD}'
            )
        return Score(value, records)

    def _evaluate(self, model: nn.Module) -> dict[str, tuple[float, BaseMetric, list]]:
        """Return, by the names of the values, points, the metric, and its results for images."""
        for data, samples in self.predictions(model):
            self.evaluator.process(data_samples=samples, data_batch=data)
        found = {}
        for metric in self.evaluator.metrics:
            results = list(metric.results)  # which the metric forgets
            for name, value in metric.evaluate(self.num_images).items():
                found[name] = METRICS.get(name, 1) * float(value), metric, results
        return found

    def difference(self, score: Score, stock: Score, same: bool = False) -> tuple:
        """Return the difference from the original, see :class:`Judge`."""
        if score.records is None:
            return *[-stock.value] * 3, 'none, since it finds nothing at all'
        if self.name == 'accuracy/top1' and not same:
            one = np.ones(1, int)
            hits = [[self._points([x], one) > 0 for x in y.records] for y in (score, stock)]
            return *paired(hits), "Agresti and Min's interval for pairs"
        found = bootstrap(self._points, score.records, stock.records, self.num_images)
        return *found, 'paired bootstrap over images'


class Agreement(Judge):
    """Compares models with what the original finds in images without annotations, in percent.

    Classifiers are compared by their labels, other models as in :func:`~repa_mm.export.agreement`.
    """

    name = 'agreement'
    expected: list | None = None

    def __call__(self, model: nn.Module) -> Score:
        """Compare a model with the first model that was given."""
        found = [samples[0].cpu() for _, samples in self.predictions(model)]
        self.expected = self.expected or found
        records = [overlap(*pair) for pair in zip(found, self.expected)]
        if num_found(records) < 2:
            raise ValueError(
                f'the model finds next to nothing in the {self.num_images} images of the folder: '
                'give images with something to find'
            )
        return Score(self._points(records, np.ones(len(records), int)), records)

    def difference(self, score: Score, stock: Score, same: bool = False) -> tuple:
        """Return the difference from the original, see :class:`Judge`."""
        if not same and 'pred_label' in score.records[0]:
            changed = sum(x['pred_label'][0].item() < 1 for x in score.records)
            found = clopper_pearson(changed, len(score.records))
            return *found, "Clopper and Pearson's interval"
        found = bootstrap(self._points, score.records, stock.records, self.num_images)
        return *found, 'bootstrap over images'

    @staticmethod
    def _points(records: list, weights: np.ndarray) -> float:
        records = [records[i] for i in np.repeat(np.arange(len(records)), weights)]
        if 'pred_label' in records[0]:
            return 100 * float(np.mean([x['pred_label'][0].item() == 1 for x in records]))
        return 100 * agreement_of(records)


def subset(
    cfg: Config, num_images: int, ann_file: str
) -> tuple[ConfigDict, list[ConfigDict], Dataset, list[int]]:
    """Choose images all over a config's validation data, or its test data if it has no others.

    ``ann_file`` is a file to write the annotations of these images to, which the metric of COCO
    needs. The loader and metrics that are returned test on these images, the indices of which in
    the whole data set are the last result. Several data sets raise ``ValueError``.
    """
    is_val = cfg.get('val_dataloader') and cfg.get('val_evaluator')
    names = [f'{"val" if is_val else "test"}_{name}' for name in ('dataloader', 'evaluator')]
    if not all(cfg.get(name) for name in names):
        raise ValueError(f'the config has no validation data with an evaluator: {INSTEAD}')
    loader, evaluator = (copy.deepcopy(cfg[name]) for name in names)
    kinds = [loader.dataset.type] * ('datasets' in loader.dataset or 'dataset' in loader.dataset)
    if isinstance(evaluator, dict) and 'metrics' in evaluator:
        if _class_of(evaluator.get('type', 'Evaluator'), EVALUATOR, cfg) is not Evaluator:
            kinds.append(evaluator.type)
        evaluator = evaluator.metrics
    if kinds:
        raise ValueError(f'{" and ".join(kinds)} of validation data: not supported, {INSTEAD}')
    evaluators = evaluator if isinstance(evaluator, list) else [evaluator]
    given = loader.dataset.pop('indices', None)
    dataset = DATASETS.build(loader.dataset)
    pool = range(len(dataset))
    if isinstance(given, int):  # the first, or the last, as MMEngine has it
        pool = pool[:given] if given >= 0 else pool[given:]
    elif given is not None:
        pool = [pool[i] for i in given]
    indices = [pool[i] for i in evenly(num_images, len(pool))]
    if len(indices) < len(dataset):
        loader.dataset.indices = indices
    for one in evaluators:
        kind = _class_of(one['type'], REGISTRY, cfg)
        if one.get('ann_file') and is_of_mmdet(kind, 'CocoMetric'):
            infos = [dataset.get_data_info(i) for i in indices]
            one.ann_file = _of_these_images(one.ann_file, infos, ann_file)
    return loader, evaluators, dataset, indices


def _class_of(name: str, registry: Registry, cfg: Config) -> type:
    with registry.switch_scope_and_registry(cfg.default_scope) as own:
        return own.get(name)


def is_of_mmdet(kind: type, name: str) -> bool:
    """Return True for a class of MMDetection's metrics, or a subclass of it."""
    module = sys.modules.get('mmdet.evaluation')
    return module is not None and issubclass(kind, getattr(module, name))


def files_of(dataset: Dataset, indices: Sequence[int]) -> list[tuple]:
    """Return names and sizes of a data set's images."""
    paths = [dataset.get_data_info(i).get('img_path', '') for i in indices]
    return [(path, osp.getsize(path) if osp.isfile(path) else 0) for path in paths]


def _of_these_images(given: str, infos: Sequence[dict], ann_file: str) -> str:
    """Return a file of COCO with the annotations of these images alone, which is written."""
    ids, content = {info['img_id'] for info in infos}, mmengine.load(given)
    if ids == {image['id'] for image in content['images']}:
        return given
    content['images'] = [image for image in content['images'] if image['id'] in ids]
    content['annotations'] = [a for a in content['annotations'] if a['image_id'] in ids]
    write_text(ann_file, json.dumps(content))
    return osp.abspath(ann_file)


def resampled(metric: BaseMetric, name: str, results: list) -> tuple[Callable, Any]:
    """Return a function of records and weights of images (images, ) to points, and the records."""
    if is_of_mmdet(type(metric), 'CocoMetric'):
        return mean_ap, coco_records(metric, results, name.split('/')[-1].split('_')[0])
    if is_of_mmdet(type(metric), 'VOCMetric'):
        points = 11 if metric.eval_mode == '11points' else None
        return partial(mean_ap, points=points), voc_records(metric, results)

    def weighted(results: list, weights: np.ndarray) -> float:
        found = metric.compute_metrics([r for r, w in zip(results, weights) for _ in range(w)])
        # A metric gives its names without its prefix.
        return METRICS[name] * float(found.get(name, found.get(name.split('/')[-1])))

    return weighted, results


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


def clopper_pearson(changed: int, number: int) -> tuple[float, float, float]:
    """Compute the loss by images whose label changed, and its exact 95 % interval, in points."""
    low, high = binomtest(changed, number).proportion_ci()
    return -100 * changed / number, -100 * high, -100 * low


def bootstrap(
    metric: Callable, records: Any, stock: Any, num_images: int
) -> tuple[float, float, float]:
    """Compute a difference and its 95 % interval by a paired bootstrap over images.

    ``metric`` maps records and the weights of images (num_images, ) to points.
    """
    rng, ones = np.random.default_rng(0), np.ones(num_images, int)
    weights = rng.multinomial(num_images, ones / num_images, RESAMPLES)
    changes = [metric(records, w) - metric(stock, w) for w in weights]
    low, high = np.nanpercentile(changes, [2.5, 97.5])
    return metric(records, ones) - metric(stock, ones), float(low), float(high)
