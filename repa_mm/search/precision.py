"""Average precision over images that are there any number of times."""

import os.path as osp
import tempfile

import mmengine
import numpy as np
from mmengine.evaluator import BaseMetric


def coco_records(metric: BaseMetric, results: list, iou_type: str) -> list[tuple]:
    """Match the results of MMDetection's ``CocoMetric`` after an evaluation with the annotations.

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
