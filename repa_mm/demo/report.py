"""Comparison of the predictions of two forms of a model, and the closing table of the demo."""

import glob
import json
import os.path as osp
from collections.abc import Sequence
from typing import Any

import numpy as np

from repa_mm.runtime.cli import align

# Two detections of one label are the same one if their boxes overlap at least this much.
SAME_IOU = 0.5


def compare_detections(first: Sequence[dict], second: Sequence[dict]) -> dict[str, Any]:
    """Largest differences between two sets of detections on the same images.

    Detections are paired image by image, in the order of the first set, each with the free one
    of the same label that overlaps it most. Pairing by position in the list would compare two
    unrelated boxes wherever two almost equal scores change places.

    Args:
        first: Predictions as MMDetection dumps them: per image a dict with ``img_id`` and
            ``pred_instances`` (``bboxes`` (N, 4) in pixels, ``scores`` (N,), ``labels`` (N,)
            and, for instance segmentation, ``masks``, a list of N compressed RLEs).
        second: The same for the other form.

    Returns:
        ``images``; ``detections``, the counts of both sets; ``paired``; ``unpaired``, the counts
        of detections without a counterpart in both sets; ``box`` (pixels) and ``score``, the
        largest differences over all pairs; with masks also ``mask_pixels``, the number of pixels
        that differ over all pairs, and ``mask_area``, the pixels of the first set's masks.

    Raises:
        ValueError: If the two sets are not about the same images.
    """
    second_by_id = _by_image(second, 'img_id')
    first_by_id = _by_image(first, 'img_id')
    if first_by_id.keys() != second_by_id.keys():
        raise ValueError(
            'the two sets of predictions are about different images '
            f'({len(first_by_id)} and {len(second_by_id)} of them)'
        )
    result: dict[str, Any] = dict(
        images=len(first_by_id), detections=[0, 0], paired=0, unpaired=[0, 0], box=0.0, score=0.0
    )
    for image_id, a in first_by_id.items():
        a, b = a['pred_instances'], second_by_id[image_id]['pred_instances']
        boxes_a, boxes_b = _numpy(a['bboxes']), _numpy(b['bboxes'])
        pairs = _pair(boxes_a, _numpy(a['labels']), boxes_b, _numpy(b['labels']))
        for i, count in enumerate((len(boxes_a), len(boxes_b))):
            result['detections'][i] += count
            result['unpaired'][i] += count - len(pairs)
        result['paired'] += len(pairs)
        if not pairs:
            continue
        ia, ib = np.array(pairs).T
        result['box'] = max(result['box'], float(abs(boxes_a[ia] - boxes_b[ib]).max()))
        result['score'] = max(
            result['score'], float(abs(_numpy(a['scores'])[ia] - _numpy(b['scores'])[ib]).max())
        )
        if 'masks' in a:
            different, area = _mask_difference(a['masks'], b['masks'], pairs)
            result['mask_pixels'] = result.get('mask_pixels', 0) + different
            result['mask_area'] = result.get('mask_area', 0) + area
    return result


def compare_segmentations(first: Sequence[dict], second: Sequence[dict]) -> dict[str, Any]:
    """Number of pixels at which two sets of label maps differ.

    Args:
        first: Predictions as MMSegmentation dumps them: per image a dict with ``img_path`` and
            ``pred_sem_seg``, whose ``data`` is the label map (1, H, W).
        second: The same for the other form.

    Returns:
        ``images``, ``pixels``, ``different`` (pixels) and ``share`` (``different / pixels``).

    Raises:
        ValueError: If the two sets are not about the same images, or an image has another size.
    """
    first_by_path, second_by_path = _by_image(first, 'img_path'), _by_image(second, 'img_path')
    if first_by_path.keys() != second_by_path.keys():
        raise ValueError(
            'the two sets of predictions are about different images '
            f'({len(first_by_path)} and {len(second_by_path)} of them)'
        )
    pixels = different = 0
    for path, a in first_by_path.items():
        a = _numpy(a['pred_sem_seg']['data'])
        b = _numpy(second_by_path[path]['pred_sem_seg']['data'])
        if a.shape != b.shape:
            raise ValueError(
                f'the label maps of {path} have different sizes: {a.shape} and {b.shape}'
            )
        pixels += a.size
        different += int((a != b).sum())
    return dict(
        images=len(first_by_path),
        pixels=pixels,
        different=different,
        share=different / max(pixels, 1),
    )


def read_metrics(work_dir: str) -> dict[str, float]:
    """Metrics of the last test run in a work directory, from the JSON file MMEngine writes.

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
        summary: As :func:`repa_mm.demo.run.run_demo` writes it to ``summary.json``.
    """
    training, deploy = summary['training'], summary['deploy']
    rows = [('', 'training form', 'deploy form', 'ratio')]

    def row(name: str, key: str, form: str, scale: float = 1, ratio: bool = False) -> None:
        a, b = training[key] * scale, deploy[key] * scale
        rows.append((name, f'{a:{form}}', f'{b:{form}}', f'{a / b:.2f}' if ratio else ''))

    for key in training['metrics']:
        values = (form['metrics'][key] for form in (training, deploy))
        rows.append((key, *('none' if v is None else f'{v:.3f}' for v in values), ''))
    row('parameters, model (M)', 'parameters', '.2f', 1e-6, True)
    row('parameters, backbone (M)', 'backbone_parameters', '.2f', 1e-6, True)
    row(f'GMACs, backbone, {summary["input_size"]}', 'backbone_macs', '.3f', 1e-9, True)
    row('latency, model (ms)', 'latency_ms', '.1f', ratio=True)
    row('latency, backbone (ms)', 'backbone_latency_ms', '.1f', ratio=True)
    lines = align(rows)
    lines.append(
        f'Latency: median of {summary["latency_scenes"]} validation scenes, batch 1, '
        f'{summary["device"]}, both forms in turn.'
    )

    difference = summary['difference']
    lines.append('')
    lines.append('Largest difference between the two forms')
    if 'share' in difference:
        lines.extend(
            align(
                [
                    (
                        '  label maps, pixels that differ',
                        f'{difference["different"]} of {difference["pixels"]} '
                        f'({difference["share"]:.1e})',
                    )
                ],
                left=2,
            )
        )
    else:
        (count_a, count_b), (lone_a, lone_b) = difference['detections'], difference['unpaired']
        details = [
            ('  boxes (px)', f'{difference["box"]:.1e}'),
            ('  scores', f'{difference["score"]:.1e}'),
        ]
        if 'mask_pixels' in difference:
            details.append(
                (
                    '  masks, pixels that differ',
                    f'{difference["mask_pixels"]} of {difference["mask_area"]}',
                )
            )
        details += [
            ('  detections in the training / deploy form', f'{count_a} / {count_b}'),
            ('  of these without a counterpart', f'{lone_a} / {lone_b}'),
        ]
        lines.extend(align(details, left=2))
    minutes, seconds = divmod(round(summary['total_seconds']), 60)
    lines += ['', f'Total time: {minutes} min {seconds} s']
    return '\n'.join(lines)


def _by_image(predictions: Sequence[dict], key: str) -> dict[Any, dict]:
    by_image = {p[key]: p for p in predictions}
    if len(by_image) != len(predictions):
        raise ValueError('a set of predictions has more than one entry for an image')
    return by_image


def _numpy(values: Any) -> np.ndarray:
    return values.numpy() if hasattr(values, 'numpy') else np.asarray(values)


def _pair(
    boxes_a: np.ndarray, labels_a: np.ndarray, boxes_b: np.ndarray, labels_b: np.ndarray
) -> list[tuple[int, int]]:
    """Indices of the same detection in both sets."""
    if not len(boxes_a) or not len(boxes_b):
        return []
    top_left = np.maximum(boxes_a[:, None, :2], boxes_b[None, :, :2])
    bottom_right = np.minimum(boxes_a[:, None, 2:], boxes_b[None, :, 2:])
    overlap = (bottom_right - top_left).clip(0).prod(-1)
    areas_a = (boxes_a[:, 2:] - boxes_a[:, :2]).prod(-1)
    areas_b = (boxes_b[:, 2:] - boxes_b[:, :2]).prod(-1)
    iou = overlap / np.maximum(areas_a[:, None] + areas_b[None] - overlap, 1e-9)
    iou[labels_a[:, None] != labels_b[None]] = 0
    pairs = []
    for i in range(len(iou)):
        j = int(iou[i].argmax())
        if iou[i, j] >= SAME_IOU:
            pairs.append((i, j))
            iou[:, j] = 0
    return pairs


def _mask_difference(masks_a: list, masks_b: list, pairs: list[tuple[int, int]]) -> tuple[int, int]:
    from pycocotools import mask as mask_utils  # comes with MMDetection, not with MMSegmentation

    different = area = 0
    for i, j in pairs:
        a, b = mask_utils.decode(masks_a[i]), mask_utils.decode(masks_b[j])
        different += int((a != b).sum())
        area += int(a.sum())
    return different, area
