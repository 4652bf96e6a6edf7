"""Boxes in operations that ONNX has."""

import copy

import onnxruntime
import pytest
import torch
from mmcv.ops import batched_nms

from repa_mm.export import ExportedModel, agreeing_onnx, agreement, noise, resized, whole_model
from repa_mm.export.detection import suppress, suppress_softly
from repa_mm.export.exporter import to_onnx
from repa_mm.io.configs import load_config
from tests.conftest import random_model


class Suppress(torch.nn.Module):
    def __init__(self, nms):
        super().__init__()
        self.nms = nms

    def forward(self, boxes, scores, labels=None):
        if labels is not None:
            return suppress_softly(boxes, scores, labels, self.nms)
        return suppress(boxes, scores, self.nms, 0.1, 80)


@pytest.mark.parametrize(
    'nms', [dict(type='nms', iou_threshold=0.5), dict(iou_thr=0.3, split_thr=10, max_num=-1)]
)
def test_suppression_is_that_of_mmcv(nms):
    generator = torch.Generator().manual_seed(0)
    boxes = torch.rand(1, 80, 4, generator=generator) * 20
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


@pytest.mark.parametrize('name', ['iou_threshold', 'iou_thr'])
def test_soft_suppression_is_that_of_mmcv(name):
    nms = {'type': 'soft_nms', name: 0.2, 'min_score': 0.2}
    generator = torch.Generator().manual_seed(0)
    boxes = torch.rand(2, 60, 4, generator=generator) * 20
    boxes[..., 2:] += boxes[..., :2]
    boxes[0, 7, 2:] = boxes[0, 7, :2]  # without an area
    scores = torch.rand(2, 60, generator=generator)
    scores[1, 50:] = -1
    labels = torch.randint(0, 3, (2, 60), generator=generator)
    inputs = dict(boxes=boxes, scores=scores, labels=labels)
    content = to_onnx(Suppress(nms), (*inputs.values(),), input_names=list(inputs))
    session = onnxruntime.InferenceSession(content)
    (found,) = session.run(None, {name: x.numpy() for name, x in inputs.items()})
    for i, number in enumerate((60, 50)):
        kept, index = batched_nms(*(x[i, :number] for x in inputs.values()), nms)
        expected = torch.full((60,), -1.0)
        expected[index] = kept[:, 4]
        torch.testing.assert_close(torch.from_numpy(found[i]), expected)
        lower = (expected[:number] < scores[i, :number]) & (expected[:number] > 0)
        assert lower.any() and len(index) < number


@pytest.mark.parametrize(
    'nms, said',
    [
        (dict(type='soft_nms'), "type='soft_nms'"),
        (dict(class_agnostic=True), 'class_agnostic=True'),
        (dict(max_num=3), 'max_num=3'),
        (dict(score_threshold=0.2), 'score_threshold=0.2'),
        (dict(sigma=0.5), 'sigma=0.5'),
        (dict(offset=1), 'offset=1'),
        (dict(type='soft_nms', method='gaussian'), "method='gaussian'"),
        (dict(type='soft_nms', class_agnostic=True), 'class_agnostic=True'),
        (None, 'iou_threshold=None'),
    ],
)
def test_other_suppressions_are_refused(nms, said):
    boxes, scores, labels = torch.rand(1, 2, 4), torch.rand(1, 2), torch.zeros(1, 2)
    nms = nms and dict(nms, iou_threshold=0.5)
    with pytest.raises(ValueError, match=f'no suppression of boxes with {said}: change'):
        if nms and len(nms) > 2:
            suppress_softly(boxes, scores, labels, nms)
        else:
            suppress(boxes, scores[:, None], nms, 0, 9)


@pytest.mark.parametrize('task', ['retinanet', 'mask_rcnn'])
def test_all_candidates(task, plain):
    """Without ``nms_pre``, or with -1, of which MMDetection's dense heads drop one a level."""
    model = plain(task)
    images = [resized([data], [(64, 64)]) for data in noise(model.cfg)]
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
    assert agreement(model, file, [resized(images, [(64, 64)])], strict=True) == 1
    if task == 'retinanet':  # images that were not resized would not tell
        model.bbox_head.test_cfg['min_bbox_size'] = 1
        with pytest.raises(ValueError, match='does not know min_bbox_size in pixels'):
            whole_model(model)


REFUSED = {
    'mmdet::guided_anchoring/ga-faster-rcnn_r50_fpn_1x_coco.py': 'GARPNHead .* it knows RPNHead',
    'mmdet::point_rend/point-rend_r50-caffe_fpn_ms-1x_coco.py': 'PointRendRoIHead',
    'mmdet::double_heads/dh-faster-rcnn_r50_fpn_1x_coco.py': 'DoubleHeadRoIHead',
    'mmdet::ms_rcnn/ms-rcnn_r50-caffe_fpn_1x_coco.py': 'MaskScoringRoIHead',
    'mmdet::faster_rcnn/faster-rcnn_r50-caffe_c4-1x_coco.py': 'shared_head, here a ResLayer',
    'mmdet::panoptic_fpn/panoptic-fpn_r50_fpn_1x_coco.py': 'PanopticFPN .* Mask2FormerHead',
    'mmdet::maskformer/maskformer_r50_ms-16xb1-75e_coco.py': 'MaskFormerHead .* Mask2FormerHead',
    'mmdet::paa/paa_r50_fpn_1x_coco.py': 'PAAHead',
    'mmdet::cascade_rpn/cascade-rpn_faster-rcnn_r50-caffe_fpn_1x_coco.py': 'CascadeRPNHead',
    'mmdet::htc/htc-without-semantic_r50_fpn_1x_coco.py': 'HybridTaskCascadeRoIHead',
    'mmdet::tood/tood_r50_fpn_1x_coco.py': 'TOODHead',
    'mmdet::yolox/yolox_tiny_8xb8-300e_coco.py': 'YOLOXHead',
    'mmdet::ddq/ddq-detr-4scale_r50_8xb2-12e_coco.py': 'DDQDETRHead',
    'mmseg::point_rend/pointrend_r101_4xb2-80k_cityscapes-512x1024.py': 'CascadeEncoderDecoder',
    'mmseg::maskformer/maskformer_r50-d32_8xb2-160k_ade20k-512x512.py': 'MaskFormerHead',
}


@pytest.mark.parametrize('config', REFUSED)
def test_what_predicts_in_another_way_is_refused_by_its_name(config):
    cfg = load_config(config)
    cfg.model.pop('pretrained', None)
    cfg.model.backbone = dict(type='ResNet', depth=18, base_channels=8)  # which runs for none
    with pytest.raises(ValueError, match=f'the export .* know.* {REFUSED[config]}'):
        whole_model(random_model(cfg))
