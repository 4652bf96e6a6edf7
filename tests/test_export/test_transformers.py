"""Whole DETR-like models predict what ``model.test_step`` does."""

import copy

import pytest
import torch
import torch.nn.functional as F

from repa_mm.export.export import agreeing_onnx, noise, resized
from repa_mm.export.exported import ExportedModel
from repa_mm.export.transformers import padding_mask
from repa_mm.run import build_model, load_config

from .test_exported import check_objects

pytest.importorskip('onnxruntime')
pytest.importorskip('mmdet')

BACKBONE = dict(depth=18, base_channels=8, stem_channels=8, init_cfg=None)
DETECTORS = dict(
    dino='dino/dino-4scale_r50_8xb2-12e_coco.py',
    deformable_detr='deformable_detr/deformable-detr_r50_16xb2-50e_coco.py',
    two_stage='deformable_detr/deformable-detr-refine-twostage_r50_16xb2-50e_coco.py',
    detr='detr/detr_r50_8xb2-150e_coco.py',
    conditional_detr='conditional_detr/conditional-detr_r50_8xb2-50e_coco.py',
    dab_detr='dab_detr/dab-detr_r50_8xb2-50e_coco.py',
)
CASES = [
    pytest.param(
        name, marks=[] if name in ('dino', 'deformable_detr', 'detr') else pytest.mark.slow
    )
    for name in DETECTORS
]
# Height and width of the images of each batch; in one of them maps of one row and one column.
BATCHES = [[(150, 200)], [(128, 96), (101, 160), (160, 130)], [(57, 250)], [(260, 60)] * 2]


def detector(name, randomize, **options):
    """A very small detector whose objects differ, and its config."""
    deformable = name in ('dino', 'deformable_detr', 'two_stage')
    dims = 256 if name in ('two_stage', 'conditional_detr') else 32  # fixed in MMDetection
    attention = dict(embed_dims=dims, num_heads=4)
    cross = dict(attention, num_points=2) if deformable else attention
    layer = dict(self_attn_cfg=attention, ffn_cfg=dict(embed_dims=dims, feedforward_channels=48))
    sizes = dict(
        backbone=BACKBONE,
        neck=dict(in_channels=[16, 32, 64] if deformable else [64], out_channels=dims),
        num_queries=25,
        positional_encoding=dict(num_feats=dims // 2),
        encoder=dict(num_layers=2, layer_cfg=layer),
        decoder=dict(num_layers=2, layer_cfg=dict(layer, cross_attn_cfg=cross)),
        bbox_head=dict(num_classes=5, embed_dims=dims),
        test_cfg=dict(max_per_img=20),
    )
    cfg = load_config(f'mmdet::{DETECTORS[name]}', dict(model=sizes))
    cfg.merge_from_dict(dict(model=options))
    return spread(randomize(build_model(cfg))), cfg


def spread(model):
    """Weights that tell queries, levels and points apart, as training does."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if not name.startswith('backbone') and parameter.ndim > 1:
            scale = 1 if 'embed' in name else parameter[0].numel() ** -0.5
            parameter.data.normal_(0, scale, generator=generator)
        elif name.startswith('memory_trans') and name.endswith('bias'):
            parameter.data.zero_()  # so that what is no proposal is not among the best
    return model


@pytest.mark.parametrize('name', CASES)
def test_detectors_agree_with_test_step(name, randomize):
    model, cfg = detector(name, randomize)
    images = noise(cfg)
    content, error = agreeing_onnx(model, images, (128, 160), True, 1, False)
    assert error == 0
    exported = ExportedModel(content, model.data_preprocessor)
    spreads = []
    for sizes in BATCHES:
        data = resized(images, sizes)
        with torch.no_grad():
            expected = model.test_step(copy.deepcopy(data))
        for a, b in zip(exported.test_step(data), expected, strict=True):
            check_objects(a.pred_instances, b.pred_instances)
            spreads.append(b.pred_instances.bboxes.std(0).max())
    assert max(spreads) > 0.1  # ten times what boxes may differ by


def test_detectors_in_standard_operators(randomize):
    """With pixels in, padding to a divisor in the graph, and one size for all images."""
    import onnx

    padding = dict(data_preprocessor=dict(pad_size_divisor=32))
    model, cfg = detector('dino', randomize, **padding)
    images = noise(cfg)
    content, error = agreeing_onnx(model, images, (128, 160), True, 1, True)
    assert error == 0
    proto = onnx.load_from_string(content)
    onnx.checker.check_model(proto, full_check=True)
    assert {node.domain for node in proto.graph.node} == {''}
    assert 'GridSample' in {node.op_type for node in proto.graph.node}
    exported = ExportedModel(content, model.data_preprocessor)
    data = resized(images, [(150, 90), (101, 160)])
    with torch.no_grad():
        expected = model.test_step(copy.deepcopy(data))
    for a, b in zip(exported.test_step(data), expected, strict=True):
        check_objects(a.pred_instances, b.pred_instances)


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
