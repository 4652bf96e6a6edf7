"""The comparison of two sets of predictions, the closing table and the pictures."""

import json
import os

import numpy as np
import pytest
import torch

from repa_mm.demo.report import (
    closing_table,
    compare_detections,
    compare_segmentations,
    read_metrics,
)


def prediction(image_id, boxes, scores, labels, **more):
    return dict(
        img_id=image_id,
        pred_instances=dict(
            bboxes=torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
            scores=torch.tensor(scores, dtype=torch.float32),
            labels=torch.tensor(labels),
            **more,
        ),
    )


BOXES = [[10.0, 10.0, 30.0, 40.0], [50.0, 60.0, 70.0, 90.0], [100.0, 20.0, 140.0, 60.0]]
SCORES = [0.9, 0.8, 0.7]
LABELS = [1, 2, 3]


def test_equal_predictions():
    a = [prediction(1, BOXES, SCORES, LABELS), prediction(2, [], [], [])]
    assert compare_detections(a, a) == dict(
        images=2, detections=[3, 3], paired=3, unpaired=[0, 0], box=0.0, score=0.0
    )


def test_largest_difference_over_images_in_any_order():
    moved = [list(b) for b in BOXES]
    moved[1][2] += 0.5
    a = [prediction(1, BOXES, SCORES, LABELS), prediction(2, BOXES, SCORES, LABELS)]
    b = [prediction(2, moved, [0.9, 0.775, 0.7], LABELS), prediction(1, BOXES, SCORES, LABELS)]
    difference = compare_detections(a, b)
    assert difference['box'] == pytest.approx(0.5)
    assert difference['score'] == pytest.approx(0.025, abs=1e-6)
    assert difference['paired'] == 6 and difference['unpaired'] == [0, 0]


def test_exchanged_places_are_no_difference():
    """Almost equal scores may change places in the list."""
    a = [prediction(1, BOXES, [0.9, 0.700001, 0.7], LABELS)]
    order = [0, 2, 1]
    b = [prediction(1, [BOXES[i] for i in order], [0.9, 0.7, 0.699999], [LABELS[i] for i in order])]
    difference = compare_detections(a, b)
    assert difference['box'] == 0 and difference['score'] < 1e-5


def test_different_counts_are_reported():
    a = [prediction(1, BOXES, SCORES, LABELS), prediction(2, [], [], [])]
    b = [prediction(1, BOXES[:2], SCORES[:2], LABELS[:2]), prediction(2, BOXES, SCORES, LABELS)]
    difference = compare_detections(a, b)
    assert difference['detections'] == [3, 5]
    assert difference['paired'] == 2 and difference['unpaired'] == [1, 3]
    # A detection without a counterpart must not show up as a moved box.
    assert difference['box'] == 0


def test_other_label_is_no_counterpart():
    a = [prediction(1, BOXES, SCORES, LABELS)]
    b = [prediction(1, BOXES, SCORES, [1, 2, 4])]
    assert compare_detections(a, b)['unpaired'] == [1, 1]


def test_neighbours_are_not_confused():
    near = [[10.0, 10.0, 30.0, 30.0], [14.0, 10.0, 34.0, 30.0]]  # IoU 0.67
    a = [prediction(1, near, [0.9, 0.8], [1, 1])]
    b = [prediction(1, near[::-1], [0.9, 0.8], [1, 1])]
    difference = compare_detections(a, b)
    assert difference['paired'] == 2 and difference['box'] == 0


def test_masks():
    mask_utils = pytest.importorskip('pycocotools.mask')
    masks = np.zeros((2, 160, 160), np.uint8)
    masks[:, 20:30, 10:20] = 1
    masks[1, 25, 10:14] = 0
    rles = [mask_utils.encode(np.asfortranarray(m)) for m in masks]
    a = [prediction(1, BOXES[:1], [0.9], [1], masks=rles[:1])]
    b = [prediction(1, BOXES[:1], [0.9], [1], masks=rles[1:])]
    difference = compare_detections(a, b)
    assert difference['mask_pixels'] == 4 and difference['mask_area'] == 100


def test_different_images_are_an_error():
    with pytest.raises(ValueError, match='different images'):
        compare_detections([prediction(1, [], [], [])], [prediction(2, [], [], [])])
    with pytest.raises(ValueError, match='more than one entry'):
        compare_detections([prediction(1, [], [], [])] * 2, [prediction(1, [], [], [])])


def segmentation(path, labels):
    return dict(img_path=path, pred_sem_seg=dict(data=torch.tensor(labels)[None]))


def test_segmentations():
    a = [segmentation('a', [[0, 1], [2, 3]]), segmentation('b', [[0, 0], [0, 0]])]
    b = [segmentation('b', [[0, 0], [0, 1]]), segmentation('a', [[0, 1], [2, 3]])]
    assert compare_segmentations(a, b) == dict(images=2, pixels=8, different=1, share=0.125)
    assert compare_segmentations(a, a)['share'] == 0
    with pytest.raises(ValueError, match='different sizes'):
        compare_segmentations([segmentation('a', [[0, 1]])], [segmentation('a', [[0], [1]])])


def test_read_metrics_takes_the_last_run(tmp_path):
    with pytest.raises(FileNotFoundError, match='no metrics'):
        read_metrics(str(tmp_path))
    for i, name in enumerate(['20250102_000000', '20250101_000000']):
        folder = tmp_path / name
        (folder / 'vis_data').mkdir(parents=True)
        (folder / 'vis_data' / 'scalars.json').write_text('{}')
        (folder / f'{name}.json').write_text(json.dumps({'coco/bbox_mAP': i}))
        os.utime(folder / f'{name}.json', (1000 + i, 1000 + i))
    assert read_metrics(str(tmp_path)) == {'coco/bbox_mAP': 1}


@pytest.mark.parametrize('task', ['retinanet', 'mask_rcnn', 'upernet'])
def test_closing_table(task):
    form = dict(
        parameters=12e6,
        backbone_parameters=8e6,
        backbone_macs=1e9,
        latency_ms=50.0,
        backbone_latency_ms=30.0,
        metrics={'box AP': 0.8125},
    )
    if task == 'upernet':
        difference = dict(images=2, pixels=1000, different=1, share=1e-3)
    else:
        difference = dict(
            images=2, detections=[31, 32], paired=31, unpaired=[0, 1], box=2e-4, score=3e-6
        )
        if task == 'mask_rcnn':
            difference.update(mask_pixels=7, mask_area=10000)
    text = closing_table(
        dict(
            training=form,
            deploy=dict(form, latency_ms=40.0, backbone_macs=5e8),
            difference=difference,
            input_size='160x160',
            latency_scenes=60,
            device='CPU',
            total_seconds=543.2,
        )
    )
    assert '1.25' in text and '2.00' in text and '0.812' in text
    assert 'Total time: 9 min 3 s' in text
    assert ('7 of 10000' in text) == (task == 'mask_rcnn')
    assert ('1 of 1000 ' if task == 'upernet' else '31 / 32') in text
    header, first = text.splitlines()[:2]
    for end in (header.index('training form') + 13, header.index('deploy form') + 11):
        assert first[:end].endswith('0.812'), 'the columns are not aligned'
    assert max(map(len, text.splitlines())) <= 100


def test_pictures(tmp_path):
    import cv2

    from repa_mm.demo.picture import WHITE, draw_detections, draw_segmentations

    path, seg_path = str(tmp_path / 'a.jpg'), str(tmp_path / 'a.png')
    cv2.imwrite(path, np.zeros((160, 160, 3), np.uint8))
    cv2.imwrite(seg_path, np.full((160, 160), 3, np.uint8))
    detection = dict(prediction(1, BOXES, [0.9, 0.8, 0.1], LABELS), img_path=path)
    truth = {1: [(BOXES[0], 1)]}
    picture = draw_detections([detection] * 5, truth, 'Title', columns=4, tile=200)
    assert picture.dtype == np.uint8 and picture.shape[1] == 4 * 208 + 8
    assert (picture == WHITE).all(-1).any()
    without = draw_detections([detection] * 5, {1: []}, 'Title', columns=4, tile=200)
    assert (picture != without).any()
    label_map = np.zeros((160, 160), np.int64)
    segmentation = dict(
        img_path=path,
        seg_map_path=seg_path,
        pred_sem_seg=dict(data=torch.from_numpy(label_map)[None]),
    )
    assert draw_segmentations([segmentation] * 3, 'Title').ndim == 3
