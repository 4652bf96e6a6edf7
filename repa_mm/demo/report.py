"""Comparison of the predictions of two forms of a model, and the closing table of the demo."""

import glob
import json
import os.path as osp
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torchvision.ops import box_iou

from repa_mm.run.cli import align

# Two detections of one label are the same one if their boxes overlap at least this much.
SAME_IOU = 0.5


def compare_detections(first: Sequence[dict], second: Sequence[dict]) -> dict[str, Any]:
    """Largest differences between two sets of detections on the same images.

    Detections are paired image by image, in the order of the first set, each with the free one of
    the same label that overlaps it most. Pairing by position in the list would compare two
    unrelated boxes wherever two almost equal scores change places.

    Args:
        first (Sequence[dict]): Predictions as MMDetection dumps them: per image a dict with
            ``img_id`` and ``pred_instances`` (``bboxes`` (N, 4) in pixels, ``scores`` (N,),
            ``labels`` (N,) and, for instance segmentation, ``masks``, a list of N compressed RLEs).
        second (Sequence[dict]): The same for the other form.

    Returns:
        dict: ``images``; ``detections``, the counts of both sets; ``paired``; ``unpaired``, the
        counts of detections without a counterpart in both sets; ``box`` (pixels) and ``score``, the
        largest differences over all pairs; with masks also ``mask_pixels``, the number of pixels
        that differ over all pairs, and ``mask_area``, the pixels of the first set's masks.

    Raises:
        ValueError: If the two sets are not about the same images.
    """
    images = _same_images(first, second, 'img_id')
    result: dict[str, Any] = dict(
        images=len(images), detections=[0, 0], paired=0, unpaired=[0, 0], box=0.0, score=0.0
    )
    for a, b in images.values():
        a, b = ({k: _array(v) for k, v in p['pred_instances'].items()} for p in (a, b))
        pairs = _pair(a, b)
        for i, count in enumerate((len(a['bboxes']), len(b['bboxes']))):
            result['detections'][i] += count
            result['unpaired'][i] += count - len(pairs)
        result['paired'] += len(pairs)
        if not pairs:
            continue
        ia, ib = np.array(pairs).T
        for name, key in (('box', 'bboxes'), ('score', 'scores')):
            result[name] = max(result[name], float(abs(a[key][ia] - b[key][ib]).max()))
        if 'masks' in a:
            different, area = _mask_difference(a['masks'][ia], b['masks'][ib])
            result['mask_pixels'] = result.get('mask_pixels', 0) + different
            result['mask_area'] = result.get('mask_area', 0) + area
    return result


def compare_segmentations(first: Sequence[dict], second: Sequence[dict]) -> dict[str, Any]:
    """Number of pixels at which two sets of label maps differ.

    Args:
        first (Sequence[dict]): Predictions as MMSegmentation dumps them: per image a dict with
            ``img_path`` and ``pred_sem_seg``, whose ``data`` is the label map (1, H, W).
        second (Sequence[dict]): The same for the other form.

    Returns:
        dict: ``images``, ``pixels``, ``different`` (pixels) and ``share``
        (``different / pixels``).

    Raises:
        ValueError: If the two sets are not about the same images, or an image has another size.
    """
    images = _same_images(first, second, 'img_path')
    pixels = different = 0
    for path, pair in images.items():
        a, b = (_array(p['pred_sem_seg']['data']) for p in pair)
        if a.shape != b.shape:
            raise ValueError(
                f'the label maps of {path} have different sizes: {a.shape} and {b.shape}'
            )
        pixels += a.size
        different += int((a != b).sum())
    share = different / max(pixels, 1)
    return dict(images=len(images), pixels=pixels, different=different, share=share)


def read_metrics(work_dir: str) -> dict[str, float]:
    """Metrics of the last test run in a work directory, from the JSON file MMEngine writes.

    Args:
        work_dir (str): The directory.

    Raises:
        FileNotFoundError: If there is none.
    """
    files = [
        f
        for f in glob.glob(osp.join(glob.escape(work_dir), '*', '*.json'))
        if osp.basename(osp.dirname(f)) == osp.splitext(osp.basename(f))[0]
    ]
    if not files:
        raise FileNotFoundError(f'{work_dir} has no metrics of a test run (<time>/<time>.json)')
    with open(max(files, key=osp.getmtime), encoding='utf-8') as f:
        return json.load(f)


def closing_table(summary: dict[str, Any]) -> str:
    """The summary of a demo run as aligned text.

    Args:
        summary (dict): As :func:`repa_mm.demo.run.run_demo` writes it to ``summary.json``.

    Returns:
        str: The lines.
    """
    forms = [summary['training'], summary['deploy']]
    rows = [('', 'training form', 'deploy form', 'ratio')]
    for name in forms[0]['metrics']:
        values = (form['metrics'][name] for form in forms)
        rows.append((name, *('none' if v is None else f'{v:.3f}' for v in values), ''))
    for name, key, unit, digits in _sizes(summary):
        a, b = (form[key] / unit for form in forms)
        rows.append((name, f'{a:.{digits}f}', f'{b:.{digits}f}', f'{a / b:.2f}'))
    d = summary['difference']
    if 'share' in d:
        pixels = f'{d["different"]} of {d["pixels"]} ({d["share"]:.1e})'
        found = {'label maps, pixels that differ': pixels}
    else:
        found = {'boxes (px)': f'{d["box"]:.1e}', 'scores': f'{d["score"]:.1e}'}
        if 'mask_pixels' in d:
            found['masks, pixels that differ'] = f'{d["mask_pixels"]} of {d["mask_area"]}'
        found['detections in the training / deploy form'] = '{} / {}'.format(*d['detections'])
        found['of these without a counterpart'] = '{} / {}'.format(*d['unpaired'])
    minutes, seconds = divmod(round(summary['total_seconds']), 60)
    return '\n'.join(
        [
            *align(rows),
            f'Latency: median of {summary["latency_scenes"]} validation scenes, batch 1, '
            f'{summary["device"]}, both forms in turn.',
            '',
            'Largest difference between the two forms',
            *align([(f'  {name}', value) for name, value in found.items()], left=2),
            '',
            f'Total time: {minutes} min {seconds} s',
        ]
    )


def conversion_table(summary: dict[str, Any]) -> str:
    """The summary of a demo of a conversion as aligned text.

    Args:
        summary (dict): As :func:`repa_mm.demo.convert.run_conversion` writes it to
            ``summary.json``.

    Returns:
        str: The lines.
    """
    models = summary['models']
    rows = [('', *models)]
    for name in next(iter(models.values()))['metrics']:
        values = (row['metrics'][name] for row in models.values())
        rows.append((name, *('none' if v is None else f'{v:.3f}' for v in values)))
    for name, key, unit, digits in _sizes(summary):
        rows.append((name, *(f'{row[key] / unit:.{digits}f}' for row in models.values())))
    minutes, seconds = divmod(round(summary['total_seconds']), 60)
    return '\n'.join(
        [
            *align(rows),
            f'Latency: median of {summary["latency_scenes"]} validation scenes, batch 1, '
            f'{summary["device"]}, all in turn. The converted ones are reparameterized.',
            '',
            f'Total time: {minutes} min {seconds} s',
        ]
    )


def _sizes(summary: dict[str, Any]) -> tuple[tuple[str, str, float, int], ...]:
    """What tables say about sizes and latencies: title, key, unit, and number of digits."""
    return (
        ('parameters, model (M)', 'parameters', 1e6, 2),
        ('parameters, backbone (M)', 'backbone_parameters', 1e6, 2),
        (f'GMACs, backbone, {summary["input_size"]}', 'backbone_macs', 1e9, 3),
        ('latency, model (ms)', 'latency_ms', 1, 1),
        ('latency, backbone (ms)', 'backbone_latency_ms', 1, 1),
    )


def _same_images(first: Sequence[dict], second: Sequence[dict], key: str) -> dict[Any, tuple]:
    """The two predictions of each image, by its id or path."""
    one, other = ({p[key]: p for p in predictions} for predictions in (first, second))
    if len(one) != len(first) or len(other) != len(second):
        raise ValueError('a set of predictions has more than one entry for an image')
    if one.keys() != other.keys():
        raise ValueError(
            'the two sets of predictions are about different images '
            f'({len(one)} and {len(other)} of them)'
        )
    return {image: (one[image], other[image]) for image in one}


def _array(values: Any) -> np.ndarray:
    return values.numpy() if torch.is_tensor(values) else np.asarray(values)


def _pair(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> list[tuple[int, int]]:
    """Indices of the same detection in both sets."""
    iou = box_iou(*(torch.as_tensor(x['bboxes']).reshape(-1, 4).double() for x in (a, b))).numpy()
    iou[a['labels'][:, None] != b['labels'][None]] = 0
    pairs = []
    for i in range(len(iou) if iou.size else 0):
        j = int(iou[i].argmax())
        if iou[i, j] >= SAME_IOU:
            pairs.append((i, j))
            iou[:, j] = 0
    return pairs


def _mask_difference(first: Sequence[dict], second: Sequence[dict]) -> tuple[int, int]:
    """Pixels that differ over all pairs of masks, and the pixels of the first ones."""
    from pycocotools import mask as mask_utils  # comes with MMDetection, not with MMSegmentation

    areas = [int(mask_utils.area(list(masks)).sum()) for masks in (first, second)]
    common = sum(
        int(mask_utils.area(mask_utils.merge([a, b], True))) for a, b in zip(first, second)
    )
    return sum(areas) - 2 * common, areas[0]
