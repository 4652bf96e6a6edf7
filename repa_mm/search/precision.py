"""Average precision of bootstrap samples, which have an image several times or not at all."""

import os.path as osp
import tempfile
from collections.abc import Callable, Sequence

import mmengine
import numpy as np
from mmengine.evaluator import BaseMetric


def coco_records(metric: BaseMetric, name: str, results: list) -> tuple[Callable, list[tuple]]:
    """Match the results of MMDetection's ``CocoMetric`` after an evaluation with the annotations.

    Returns:
        tuple: :func:`mean_ap`, and its records: for each category, of D detections in descending
        order of their scores: the index of their image (D, ), whether they match an object and
        whether they are ignored, for each threshold (T, D); and the number of objects in each image
        (images, ).
    """
    from mmdet.datasets.api_wrappers import COCOeval

    iou_type = name.split('/')[-1].split('_')[0]
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
    none = np.zeros((len(metric.iou_thrs), 0))
    nothing = dict(dtScores=[], dtMatches=none, dtIgnore=none, gtIgnore=[])
    images = [row or nothing for row in ev.evalImgs]  # of each category, in order of their ids
    return mean_ap, [
        _record(
            [row['dtScores'] for row in rows],
            [np.asarray(row['dtMatches']) > 0 for row in rows],
            [np.asarray(row['dtIgnore']) > 0 for row in rows],
            [np.sum(np.equal(row['gtIgnore'], 0)) for row in rows],
        )
        for rows in (images[i : i + len(results)] for i in range(0, len(images), len(results)))
    ]


def _record(scores: Sequence, hits: Sequence, ignored: Sequence, objects: Sequence) -> tuple:
    """Put together what images have: scores (D, ), hits and ignored (T, D), number of objects."""
    images = np.repeat(np.arange(len(scores)), [len(x) for x in scores])
    by = np.argsort(-np.concatenate(scores), kind='stable')
    hits, ignored = (np.concatenate(x, 1)[:, by] for x in (hits, ignored))
    return images[by], hits, ignored, np.array(objects)


def mean_ap(records: list[tuple], weights: np.ndarray) -> float:
    """Compute COCO's average precision, in points, if each image is there ``weights`` (n, ) times.

    It is the mean over categories, thresholds and 101 recalls.
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
            values.append(one[np.searchsorted(recall, np.linspace(0, 1, 101))].mean())
    return 100 * float(np.mean(values)) if values else float('nan')
