"""Whole DETR-like models predict what ``model.test_step`` does."""

import copy

import pytest
import torch
import torch.nn.functional as F
from mmengine.config import ConfigDict

from repa_mm.export import ExportedModel, agreeing_onnx, resized
from repa_mm.export.exporter import MAX_ERROR
from repa_mm.export.transformers import _extent, padding_mask

from .test_families import OF_DETECTORS
from .zoo import RESNET, detr_config, mask_config, small_images, small_model


def co_detector(**nms):
    from tests.co_detr import co_detr

    backbone = dict(RESNET, type='ResNet', out_indices=(1, 2, 3))
    cfg = detr_config('DINO')
    cfg.model = ConfigDict(co_detr(backbone, [16, 32, 64], nms))
    model = small_model(cfg)
    model.query_head.transformer.enc_output.bias.data.zero_()
    return model, small_images(cfg)


@pytest.mark.parametrize('kind', ['soft_nms', pytest.param('nms', marks=pytest.mark.slow)])
def test_a_co_detr_agrees_with_test_step(kind):
    """A stand-in, see :mod:`tests.co_detr`, in standard operators."""
    import onnx

    model, images = co_detector(type=kind, iou_threshold=0.1)
    content, error = agreeing_onnx(model, images, (128, 160))
    assert error == 0
    assert {node.domain for node in onnx.load_from_string(content).graph.node} == {''}
    exported = ExportedModel(content, model.data_preprocessor)
    model.query_head.test_cfg.nms = None
    changes = []
    for sizes in OF_DETECTORS:
        data = resized(images, sizes)
        found, plain = (m.test_step(copy.deepcopy(data)) for m in (exported, model))
        for a, b in zip(found, plain, strict=True):
            a, b = a.pred_instances.scores, b.pred_instances.scores
            changes.append(len(a) < len(b) or (a - b).abs().max() > 0.01)
    assert any(changes)  # by the suppression


def test_masks_of_padding_are_those_of_interpolation():
    sizes = torch.tensor([[200, 301], [97, 333], [250, 17]])
    for height, width in ((250, 333), (256, 352)):
        mask = torch.ones(3, height, width)
        for image, (h, w) in zip(mask, sizes):
            image[:h, :w] = 0
        for shape in ((32, 42), (7, 9), (1, 3), (250, 333)):
            found = padding_mask(torch.zeros(3, 8, *shape), torch.tensor([height, width]), sizes)
            expected = F.interpolate(mask[None], size=shape)[0].bool()
            assert torch.equal(found, expected) and found.any() and not found.all()


def test_low_scores_may_count_in_panoptic_maps():
    model = small_model(mask_config('Mask2Former'))
    images = small_images(model.cfg)
    data = resized(images, [(128, 160)])
    model.panoptic_fusion_head.test_cfg.instance_on = False
    holes = []
    for model.panoptic_fusion_head.test_cfg.filter_low_score in (True, False):
        found = model.test_step(copy.deepcopy(data))[0].pred_panoptic_seg.sem_seg
        holes.append((found == 5).sum())
    assert holes[0] > holes[1]
    content, error = agreeing_onnx(model, images, (128, 160), False)
    assert error <= MAX_ERROR['panoptic'][0]


def test_boxes_around_masks():
    from mmdet.structures.mask import mask2bbox

    inside = torch.rand(1, 40, 11, 17, generator=torch.Generator().manual_seed(0)) > 0.97
    inside[:, 0] = False
    x, y = _extent(inside.float().amax(2)), _extent(inside.float().amax(3))
    boxes = torch.stack([x[0], y[0], x[1], y[1]], 2)
    assert torch.equal(boxes[0], mask2bbox(inside[0])) and not boxes[0, 0].any()
