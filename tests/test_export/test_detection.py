"""Boxes in operations that ONNX has."""

import copy

import pytest
import torch

from repa_mm.config import load_config
from repa_mm.export import ExportedModel, agreeing_onnx, agreement, noise, resized, whole_model
from repa_mm.export.detection import decode, suppress, suppress_softly
from repa_mm.export.exporter import to_onnx
from repa_mm.opening import open_model
from tests.conftest import random_model

pytest.importorskip('onnxruntime')
pytest.importorskip('mmdet')


def test_boxes_are_decoded_as_by_the_coder():
    from mmdet.models.task_modules.coders import DeltaXYWHBBoxCoder

    generator = torch.Generator().manual_seed(0)
    boxes = torch.rand(50, 4, generator=generator).cumsum(1) * 60
    boxes = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1)
    deltas = torch.randn(50, 12, generator=generator) * 5
    size = torch.tensor([120.0, 90.0, 120.0, 90.0])
    for options in (
        dict(),
        dict(target_means=(0.1, 0.2, 0.3, 0.4), target_stds=(0.1, 0.1, 0.2, 0.2)),
        dict(clip_border=False),
        dict(add_ctr_clamp=True, ctr_clamp=8),
    ):
        coder = DeltaXYWHBBoxCoder(**options)
        expected = coder.decode(boxes, deltas, max_shape=(90, 120)).reshape(1, 50, 3, 4)
        found = decode(coder, boxes[None], deltas[None], size)
        torch.testing.assert_close(found, expected)


class Suppress(torch.nn.Module):
    def __init__(self, nms):
        super().__init__()
        self.nms = nms

    def forward(self, boxes, scores):
        return suppress(boxes, scores, self.nms, 0.1, 80)


@pytest.mark.parametrize(
    'nms',
    [
        dict(type='nms', iou_threshold=0.5),
        dict(iou_threshold=0.5, offset=1),
        dict(iou_thr=0.3, split_thr=10, max_num=-1),
    ],
)
def test_suppression_is_that_of_mmcv(nms):
    import onnxruntime
    from mmcv.ops import batched_nms

    generator = torch.Generator().manual_seed(0)
    boxes = torch.rand(1, 80, 4, generator=generator) * 20  # small, so that a pixel counts
    boxes[..., 2:] += boxes[..., :2]
    scores = torch.rand(1, 3, 80, generator=generator)
    content = to_onnx(Suppress(nms), (boxes, scores), input_names=['boxes', 'scores'])
    inputs = dict(boxes=boxes.numpy(), scores=scores.numpy())
    kept = torch.from_numpy(onnxruntime.InferenceSession(content).run(None, inputs)[0])
    flat = scores.flatten()
    index = (flat > 0.1).nonzero()[:, 0]
    found, keep = batched_nms(boxes[0].repeat(3, 1)[index], flat[index], index // 80, nms)
    expected = torch.full((240,), -1.0)
    expected[index[keep]] = found[:, 4]
    assert torch.equal(kept.flatten(), expected) and 0 < len(keep) < 240


class SuppressSoftly(torch.nn.Module):
    def __init__(self, nms):
        super().__init__()
        self.nms = nms

    def forward(self, boxes, scores, labels):
        return suppress_softly(boxes, scores, labels, self.nms)


def test_soft_suppression_is_that_of_mmcv():
    import onnxruntime
    from mmcv.ops import batched_nms

    nms = dict(type='soft_nms', iou_threshold=0.3, min_score=0.2)
    generator = torch.Generator().manual_seed(0)
    boxes = torch.rand(2, 60, 4, generator=generator) * 20
    boxes[..., 2:] += boxes[..., :2]
    boxes[0, 7, 2:] = boxes[0, 7, :2]  # without an area
    scores = torch.rand(2, 60, generator=generator)
    scores[1, 50:] = -1
    labels = torch.randint(0, 3, (2, 60), generator=generator)
    inputs = dict(boxes=boxes, scores=scores, labels=labels)
    content = to_onnx(SuppressSoftly(nms), (*inputs.values(),), input_names=list(inputs))
    session = onnxruntime.InferenceSession(content)
    (found,) = session.run(None, {name: x.numpy() for name, x in inputs.items()})
    for i, number in enumerate((60, 50)):
        kept, index = batched_nms(*(x[i, :number] for x in inputs.values()), nms)
        expected = torch.full((60,), -1.0)
        expected[index] = kept[:, 4]
        torch.testing.assert_close(torch.from_numpy(found[i]), expected)
        lower = (expected[:number] < scores[i, :number]) & (expected[:number] > 0)
        assert lower.any() and len(index) < number


@pytest.mark.parametrize('options', [dict(method='gaussian'), dict(class_agnostic=True)])
def test_other_soft_suppressions_are_refused(options):
    (name,), nms = options, dict(type='soft_nms', iou_threshold=0.5, **options)
    with pytest.raises(ValueError, match=f'no suppression of boxes with {name}='):
        suppress_softly(torch.rand(1, 2, 4), torch.rand(1, 2), torch.zeros(1, 2), nms)


@pytest.mark.parametrize(
    'options',
    [
        dict(type='soft_nms'),
        dict(class_agnostic=True),
        dict(max_num=3),
        dict(score_threshold=0.2),
        dict(sigma=0.5),
    ],
)
def test_other_suppressions_are_refused(options):
    (name,), nms = options, dict(iou_threshold=0.5, **options)
    with pytest.raises(ValueError, match=f'no suppression of boxes with {name}='):
        suppress(torch.rand(1, 2, 4), torch.rand(1, 3, 2), nms, 0, 9)
    with pytest.raises(ValueError, match='no suppression of boxes with iou_threshold=None'):
        suppress(torch.rand(1, 2, 4), torch.rand(1, 3, 2), None, 0, 9)


@pytest.mark.parametrize('task', ['retinanet', 'mask_rcnn'])
def test_all_candidates(task, built):
    """Without ``nms_pre``, or with -1, of which MMDetection's dense heads drop one a level."""
    config, checkpoint, _ = built(task)
    cfg = load_config(config)
    model = open_model(cfg, checkpoint, merge=True)
    images = [resized([data], [(64, 64)]) for data in noise(cfg)]
    if task == 'retinanet':
        del model.bbox_head.test_cfg['nms_pre']
        # Few candidates, so that the one counts.
        scores = model.test_step(copy.deepcopy(images[0]))[0].pred_instances.scores
        model.bbox_head.test_cfg['score_thr'] = float(scores[9:11].mean())
        assert 2 < len(model.test_step(copy.deepcopy(images[0]))[0].pred_instances) < 10
    else:
        model.rpn_head.test_cfg['nms_pre'] = -1
    content, _ = agreeing_onnx(model, images, (64, 64), False)
    file = ExportedModel(content, model.data_preprocessor)
    assert agreement(model, file, [resized(images, [(64, 64)])], exact=True) == 1


@pytest.mark.parametrize(
    'config',
    [
        'guided_anchoring/ga-faster-rcnn_r50_fpn_1x_coco.py',
        'cascade_rpn/cascade-rpn_faster-rcnn_r50-caffe_fpn_1x_coco.py',
    ],
)
def test_other_proposals_are_refused(config):
    model = random_model(load_config(f'mmdet::{config}'))
    with pytest.raises(ValueError, match='RPNHead'):
        whole_model(model)
