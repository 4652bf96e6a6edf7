"""What a model finds, in points of a metric, and intervals of differences over images."""

import copy
import json
import os.path as osp
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import mmengine
import numpy as np
import torch
import torch.nn as nn
from mmengine.config import Config, ConfigDict
from mmengine.dataset import pseudo_collate
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.registry import DATASETS
from mmengine.registry import METRICS as METRIC_TYPES
from torch.utils.data import Dataset

from repa_mm.apis.images import evenly
from repa_mm.export import agreement_of, num_found, overlap
from repa_mm.io.files import write_text
from repa_mm.search.precision import coco_records
from repa_mm.search.record import hash_of_file, hashed

#: Metrics to judge by, the first that an evaluator has, with short names and the points of a 1 in
#: them. In others less may be better, or images cannot be resampled.
METRICS = {
    'coco/segm_mAP': ('mask AP', 100), 'coco/bbox_mAP': ('box AP', 100),
    'mIoU': ('mIoU', 1), 'mDice': ('mDice', 1),
    'mFscore': ('mFscore', 1), 'multi-label/mAP': ('mAP', 1), 'accuracy/top1': ('top-1', 1),
}  # fmt: skip
RESAMPLES = 400
#: With fewer images, the bootstrap's interval is too narrow to guarantee a largest loss.
LEAST_IMAGES = 30
INSTEAD = 'give a folder of images (--images), to compare with what the original model finds'


class Score(NamedTuple):
    """The metric of a model in points, and how it follows from images.

    ``points`` maps records of the images and their weights (images, ) to the metric. The records
    of a classifier are an array that tells in which images its label is right.
    """

    value: float
    points: Callable
    records: Any


class Judge:
    """Images of a data set to test on. A subclass is called with a model, and returns its score.

    Attributes:
        name (str): Name of the metric, '' before the first test.
        mark (str): Hash of the images' names and sizes, and of their annotations.
        config (dict): Parts of a config that tests on these images, or {} without annotations.
    """

    name = ''
    #: Of two more images, whether a model is right, and whether the original is: better and worse.
    added = [0, 1], [1, 0]

    def __init__(self, dataset: Dataset, indices: Sequence[int]) -> None:
        self.dataset, self.indices, self.config = dataset, indices, {}
        self.num_images = len(indices)
        self.mark = hashed(files_of(dataset, indices))

    def images(self, number: int, batch_size: int = 1) -> list[dict]:
        """Return batches of images, spread over those to test on."""
        chosen = evenly(number * batch_size, self.indices)
        chosen *= -(-batch_size // len(chosen))  # of fewer images than a batch, some come again
        starts = range(0, len(chosen) - batch_size + 1, batch_size)
        return [pseudo_collate([self.dataset[i] for i in chosen[s:][:batch_size]]) for s in starts]

    def predictions(self, model: nn.Module) -> Iterator[tuple]:
        """Yield each image, as a batch, and what a model with ``test_step`` finds in it."""
        with torch.no_grad():
            for i in self.indices:
                data = pseudo_collate([self.dataset[i]])
                yield data, model.test_step(data)

    def difference(self, score: Score, stock: Score, same: bool = False) -> tuple:
        """Return the difference of two scores in points, and the bounds of its 95 % interval.

        The interval is from a paired bootstrap over images. ``same`` says that both models are
        equal except for rounding.
        """
        number, records, resamples = self.num_images, [score.records, stock.records], RESAMPLES
        after, before = (score.points(x, np.ones(number, int)) for x in records)
        if isinstance(score.records, np.ndarray) and not same:
            # A bootstrap would be certain if no label changes in these images: there are two more.
            records = [np.append(*pair) for pair in zip(records, self.added)]
            number, resamples = number + 2, 5 * RESAMPLES
        rng, changes = np.random.default_rng(0), []
        for _ in range(resamples):
            weights = rng.multinomial(number, np.full(number, 1 / number))
            changed, original = (score.points(x, weights) for x in records)
            changes.append(changed - original)
        return after - before, *np.nanpercentile(changes, [2.5, 97.5]).tolist()


class Annotated(Judge):
    """Tests models by the config's own evaluator on images of its data, see :func:`subset`."""

    def __init__(self, cfg: Config, num_images: int, ann_file: str) -> None:
        loader, evaluators, dataset, indices = subset(cfg, num_images, ann_file)
        super().__init__(dataset, indices)
        self.config = dict(test_dataloader=loader, test_evaluator=evaluators)
        infos = [dataset.get_data_info(i) for i in indices]
        paths = [e.get('ann_file') for e in evaluators] + [x.get('seg_map_path') for x in infos]
        self.mark = hashed(self.mark, infos, *(hash_of_file(path) for path in paths if path))

    def __call__(self, model: nn.Module) -> Score:
        """Test a model."""
        # Another one each time: metrics keep the results of a test that fails.
        evaluator, found = Evaluator(copy.deepcopy(self.config['test_evaluator'])), {}
        evaluator.dataset_meta = self.dataset.metainfo
        for data, samples in self.predictions(model):
            evaluator.process(data_samples=samples, data_batch=data)
        for metric in evaluator.metrics:
            results = list(metric.results)  # which the metric forgets
            for name, value in metric.evaluate(self.num_images).items():
                found[name] = float(value), metric, results
        name = next((name for name in METRICS if name in found), None)
        if name is None:
            raise ValueError(
                f"the config's evaluator gives {', '.join(found) or 'no metric'}, and none of "
                f'{", ".join(METRICS)}: {INSTEAD}'
            )
        self.name, (value, metric, results) = name, found[name]
        value *= METRICS[name][1]
        points, records = adapter_of(type(metric)).records(metric, name, results)
        # A metric of one's own class may compute something else than what is resampled. Without an
        # object, COCO's precision is -1, and ours not a number.
        if not abs(points(records, np.ones(self.num_images, int)) - value) <= 0.1:
            raise ValueError(
                f'{type(metric).__name__} computes another {name} than MMDetection, or there is no '
                f'object in the images: {INSTEAD}'
            )
        return Score(value, points, records)


class Agreement(Judge):
    """Compares models with what the original finds in images without annotations, in percent.

    Classifiers are compared by their labels, other models as in :func:`~repa_mm.export.agreement`.
    """

    name = 'agreement'
    expected: list | None = None
    added = [0, 0], [1, 1]  # nothing is better

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
        points = _mean_agreement
        if 'pred_label' in records[0]:
            points, records = share, np.array([x['pred_label'][0].item() == 1 for x in records])
        return Score(points(records, np.ones(len(records), int)), points, records)


def _mean_agreement(records: list, weights: np.ndarray) -> float:
    return 100 * agreement_of([x for x, weight in zip(records, weights) for _ in range(weight)])


def subset(
    cfg: Config, num_images: int, ann_file: str
) -> tuple[ConfigDict, list[ConfigDict], Dataset, list[int]]:
    """Choose images all over a config's validation data, or its test data if it has no others.

    ``ann_file`` is a file to write the annotations of these images to, which the metrics of COCO
    need: it gets the number of the metric before its suffix. The loader and metrics that are
    returned test on these images, the indices of which in the whole data set are the last result.
    Several data sets raise ``ValueError``.
    """
    is_val = cfg.get('val_dataloader') and cfg.get('val_evaluator')
    names = [f'{"val" if is_val else "test"}_{name}' for name in ('dataloader', 'evaluator')]
    if not all(cfg.get(name) for name in names):
        raise ValueError(f'the config has no validation data with an evaluator: {INSTEAD}')
    loader, evaluator = (copy.deepcopy(cfg[name]) for name in names)
    if 'datasets' in loader.dataset or 'dataset' in loader.dataset:
        kind = loader.dataset.type
        raise ValueError(f'{kind} of validation data: not supported, {INSTEAD}')
    if 'metrics' in evaluator:  # of an Evaluator
        evaluator = evaluator.metrics
    evaluators = evaluator if isinstance(evaluator, list) else [evaluator]
    given = loader.dataset.pop('indices', None)
    dataset = DATASETS.build(loader.dataset)
    pool = range(len(dataset))
    if isinstance(given, int):  # the first, or the last, as MMEngine has it
        pool = pool[:given] if given >= 0 else pool[given:]
    elif given is not None:
        pool = [pool[i] for i in given]
    indices = evenly(num_images, pool)
    if len(indices) < len(dataset):
        loader.dataset.indices = indices
        ids = {dataset.get_data_info(i).get('img_id') for i in indices}
        with METRIC_TYPES.switch_scope_and_registry(None) as registry:
            kinds = [registry.get(one.type) for one in evaluators]
        for i, (kind, one) in enumerate(zip(kinds, evaluators)):
            if restrict := adapter_of(kind).restrict:
                restrict(one, ids, f'{osp.splitext(ann_file)[0]}_{i}.json')
    return loader, evaluators, dataset, indices


def files_of(dataset: Dataset, indices: Sequence[int]) -> list[tuple]:
    """Return names and sizes of a data set's images."""
    paths = [dataset.get_data_info(i).get('img_path', '') for i in indices]
    return [(path, osp.getsize(path) if osp.isfile(path) else 0) for path in paths]


def share(hits: np.ndarray, weights: np.ndarray) -> float:
    """Return the percentage of images with a hit."""
    return 100 * float(hits @ weights / weights.sum())


def with_own_annotations_(evaluator: ConfigDict, ids: set, ann_file: str) -> None:
    """Write a file of COCO with the annotations of some images alone, and let a metric read it."""
    if evaluator.get('ann_file'):
        content = mmengine.load(evaluator.ann_file)
        content['images'] = [image for image in content['images'] if image['id'] in ids]
        content['annotations'] = [a for a in content['annotations'] if a['image_id'] in ids]
        write_text(ann_file, json.dumps(content))
        evaluator.ann_file = osp.abspath(ann_file)


def computed_anew(metric: BaseMetric, name: str, results: list) -> tuple[Callable, Any]:
    """Let a metric compute its value anew from results that are there several times or not."""

    def weighted(results: list, weights: Sequence[int]) -> float:
        found = metric.compute_metrics([r for r, w in zip(results, weights) for _ in range(w)])
        # A metric gives its names without its prefix.
        return METRICS[name][1] * float(found.get(name, found.get(name.split('/')[-1])))

    if name == 'accuracy/top1':
        return share, np.array([weighted([result], [1]) > 0 for result in results])
    return weighted, results


class Adapter(NamedTuple):
    """What a search needs of a class of metrics.

    ``restrict`` changes a metric's config in place, given images' ids and a file for annotations.
    ``records`` returns a function of records and weights of images (images, ) to points, and the
    records, given a metric, its name in :data:`METRICS` and its results.
    """

    restrict: Callable | None = None
    records: Callable = computed_anew


#: By the names of classes, which their subclasses share.
ADAPTERS = dict(
    CocoMetric=Adapter(with_own_annotations_, coco_records),
    CocoPanopticMetric=Adapter(with_own_annotations_),
)


def adapter_of(kind: type) -> Adapter:
    """Return the adapter of a class of metrics."""
    return next((ADAPTERS[x.__name__] for x in kind.__mro__ if x.__name__ in ADAPTERS), Adapter())
