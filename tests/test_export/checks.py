"""A file predicts what its model does."""

import copy

import torch

from repa_mm.export import resized


def check_objects(actual, expected):
    """Every object has a counterpart, and boxes, or else masks, tell them apart."""
    assert len(actual) == len(expected) > 5
    assert 'masks' in expected or expected.bboxes.std(0).max() > 0.1
    boxes = (expected.bboxes[:, None] - actual.bboxes).abs().amax(2)
    fits = (boxes < 1e-2) & (expected.labels[:, None] == actual.labels)
    fits &= (expected.scores[:, None] - actual.scores).abs() < 1e-4
    assert fits.any(1).all() and fits.any(0).all()
    if 'masks' in expected:
        actual_masks = actual.masks[fits.int().argmax(1)]
        assert expected.masks.any()
        assert (actual_masks != expected.masks).float().mean() < 1e-3


def check_maps(actual, expected, largest=1e-3):
    assert len(expected.unique()) > 1 and torch.equal(actual.unique(), expected.unique())
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert (actual != expected).float().mean() <= largest


@torch.no_grad()
def check_file(model, exported, images, sizes):
    """What is found in images of these sizes, which were resized before; the model's."""
    data = resized(images, sizes)
    for sample, (height, width) in zip(data['data_samples'], sizes):
        ori_shape = round(height / 0.8), round(width / 0.8)
        sample.set_metainfo(dict(ori_shape=ori_shape, scale_factor=(0.8, 0.8)))
    expected = model.test_step(copy.deepcopy(data))
    for a, b in zip(exported.test_step(data), expected, strict=True):
        if 'pred_instances' in b:
            check_objects(a.pred_instances, b.pred_instances)
        if 'pred_panoptic_seg' in b:
            # Two queries are nearly equal along the edges, and their masks are random.
            check_maps(a.pred_panoptic_seg.sem_seg, b.pred_panoptic_seg.sem_seg, 5e-3)
        if 'pred_sem_seg' in b:
            check_maps(a.pred_sem_seg.data, b.pred_sem_seg.data)
        if 'pred_score' in b:
            torch.testing.assert_close(a.pred_score, b.pred_score, atol=1e-5, rtol=0)
            assert a.pred_label == b.pred_label
    return expected
