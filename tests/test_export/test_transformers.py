"""Whole DETR-like models predict what ``model.test_step`` does."""

import copy

import pytest
import torch
import torch.nn.functional as F
from mmengine.config import ConfigDict

from repa_mm.export import ExportedModel, agreeing_onnx, noise, resized
from repa_mm.export.exporter import MAX_ERROR
from repa_mm.export.transformers import _extent, padding_mask
from repa_mm.io.configs import load_config
from tests.conftest import random_model

from .test_runtime_model import check_objects

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


def small_images(cfg):
    return [resized([data], [(160, 200)]) for data in noise(cfg)]


def detector(name, randomize, **options):
    """A very small detector whose objects differ, and its config."""
    deformable = name in ('dino', 'deformable_detr', 'two_stage')
    # Fixed in MMDetection, that of DINO in 3.3.
    dims = 256 if name in ('dino', 'two_stage', 'conditional_detr') else 32
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
    return spread(randomize(random_model(cfg))), cfg


def spread(model):
    """Weights that tell queries, levels, points and classes apart, as training does."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if not name.startswith('backbone') and parameter.ndim > 1:
            is_code = any(part in name for part in ('query_embed', 'query_feat', 'level_'))
            is_code = is_code or name.endswith('cls_emb')
            scale = 1 if is_code else parameter[0].numel() ** -0.5
            parameter.data.normal_(0, scale, generator=generator)
        elif name.startswith('memory_trans') and name.endswith('bias'):
            parameter.data.zero_()  # so that what is no proposal is not among the best
    return model


@pytest.mark.parametrize('name', CASES)
def test_detectors_agree_with_test_step(name, randomize):
    import onnx

    # DINO also with padding to a divisor in the graph.
    padding = dict(data_preprocessor=dict(pad_size_divisor=32)) if name == 'dino' else {}
    model, cfg = detector(name, randomize, **padding)
    images = small_images(cfg)
    content, error = agreeing_onnx(model, images, (128, 160))
    assert error == 0
    proto = onnx.load_from_string(content)
    onnx.checker.check_model(proto, full_check=True)
    assert {node.domain for node in proto.graph.node} == {''}
    has_levels = hasattr(model, 'gen_encoder_output_proposals')
    assert has_levels == ('GridSample' in {node.op_type for node in proto.graph.node})
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


CO_BACKBONE = dict(BACKBONE, type='ResNet', out_indices=(1, 2, 3))


def co_detector(randomize, **nms):
    from tests.co_detr import co_detr

    cfg = load_config(f'mmdet::{DETECTORS["dino"]}')
    cfg.model = ConfigDict(co_detr(CO_BACKBONE, [16, 32, 64], nms))
    model = spread(randomize(random_model(cfg)))
    model.query_head.transformer.enc_output.bias.data.zero_()
    return model, cfg


@pytest.mark.parametrize('kind', ['soft_nms', pytest.param('nms', marks=pytest.mark.slow)])
def test_a_co_detr_agrees_with_test_step(kind, randomize):
    """A stand-in, see :mod:`tests.co_detr`, in standard operators."""
    import onnx

    model, cfg = co_detector(randomize, type=kind, iou_threshold=0.1)
    images = small_images(cfg)
    content, error = agreeing_onnx(model, images, (128, 160))
    assert error == 0
    assert {node.domain for node in onnx.load_from_string(content).graph.node} == {''}
    exported = ExportedModel(content, model.data_preprocessor)
    model.query_head.test_cfg.nms = None
    changes = []
    for sizes in BATCHES:
        data = resized(images, sizes)
        with torch.no_grad():
            plain = model.test_step(copy.deepcopy(data))
        for a, b in zip(exported.test_step(data), plain, strict=True):
            a, b = a.pred_instances.scores, b.pred_instances.scores
            changes.append(len(a) < len(b) or (a - b).abs().max() > 0.01)
    assert any(changes)  # by the suppression


def test_other_heads_of_a_co_detr_are_refused(randomize):
    model, cfg = co_detector(randomize, type='nms', iou_threshold=0.8)
    model.eval_module = 'two-stage'
    with pytest.raises(ValueError, match="set model.eval_module='detr'"):
        agreeing_onnx(model, small_images(cfg))


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


# Height and width of the images of each batch: one size, as a batch has one label map's size.
MASK_BATCHES = [[(150, 200)], [(128, 96)] * 3, [(65, 250)]]


MASK_MODELS = dict(
    instances='mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco.py',
    semantic='mmseg::mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py',
    panoptic='mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco-panoptic.py',
)


def mask_model(kind, randomize):
    """A very small Mask2Former for instances, panoptic maps or label maps, and its config."""
    attention = dict(embed_dims=32, num_heads=4)
    ffn = dict(ffn_cfg=dict(embed_dims=32, feedforward_channels=48))
    encoder = dict(
        encoder=dict(num_layers=2, layer_cfg=dict(ffn, self_attn_cfg=attention)),
        positional_encoding=dict(num_feats=16),
    )
    head = dict(
        in_channels=[8, 16, 32, 64],
        feat_channels=32,
        out_channels=32,
        num_queries=15,
        positional_encoding=dict(num_feats=16),
        pixel_decoder=dict(encoder, norm_cfg=dict(num_groups=4)),
        transformer_decoder=dict(
            num_layers=3, layer_cfg=dict(ffn, self_attn_cfg=attention, cross_attn_cfg=attention)
        ),
        loss_cls=dict(class_weight=[1.0] * 6),
    )
    if kind != 'semantic':
        is_panoptic = kind == 'panoptic'
        classes = dict(num_things_classes=5 - 2 * is_panoptic, num_stuff_classes=2 * is_panoptic)
        options = dict(
            panoptic_head=dict(head, **classes),
            panoptic_fusion_head=classes,
            test_cfg=dict(max_per_image=20, panoptic_on=is_panoptic, instance_on=True),
            data_preprocessor=dict(pad_size_divisor=96 if is_panoptic else 32),
        )
        if is_panoptic:  # some queries, and most of their masks, are kept
            options['test_cfg'].update(object_mask_thr=0.2, iou_thr=0.1)
    else:
        options = dict(decode_head=dict(head, num_classes=5))
        options['backbone'] = dict(norm_cfg=dict(type='BN'))
    options['backbone'] = dict(BACKBONE, **options.get('backbone', {}))
    cfg = load_config(MASK_MODELS[kind], dict(model=options))
    model = spread(randomize(random_model(cfg)))
    head = getattr(model, 'panoptic_head', None) or model.decode_head
    data = model.data_preprocessor(resized(small_images(cfg), [(128, 160)]), False)
    # Of random weights, all queries are nearly the same.
    with torch.no_grad():
        for layer in (head.cls_embed, head.mask_embed[-1], head.pixel_decoder.mask_feature):
            found = []
            hook = layer.register_forward_hook(lambda *args, found=found: found.append(args[2]))
            model(**copy.deepcopy(data), mode='predict')
            hook.remove()
            out = found[-1].movedim(1, -1) if layer.weight.ndim == 4 else found[-1]
            out = out[-1] if layer.weight.ndim < out.ndim - 1 else out  # of all decoder layers
            std, mean = torch.std_mean(out.flatten(0, -2), 0)
            layer.weight /= std.view(-1, *[1] * (layer.weight.ndim - 1))
            layer.bias.copy_((layer.bias - mean) / std)
    return model, cfg


def check_maps(actual, expected, largest=1e-3):
    assert len(expected.unique()) > 1 and torch.equal(actual.unique(), expected.unique())
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert (actual != expected).float().mean() <= largest


@pytest.mark.parametrize('kind', MASK_MODELS)
def test_mask_models_agree_with_test_step(kind, randomize):
    model, cfg = mask_model(kind, randomize)
    images = small_images(cfg)
    content, _ = agreeing_onnx(model, images, (128, 160))
    exported, seen = ExportedModel(content, model.data_preprocessor), set()
    for sizes in MASK_BATCHES:
        data = resized(images, sizes)
        for sample, (height, width) in zip(data['data_samples'], sizes):
            sample.set_metainfo(dict(ori_shape=(round(height / 0.8), round(width / 0.8))))
        with torch.no_grad():
            expected = model.test_step(copy.deepcopy(data))
        for a, b in zip(exported.test_step(data), expected, strict=True):
            assert ('pred_instances' in b) == (kind != 'semantic')
            if 'pred_instances' in b:
                check_objects(a.pred_instances, b.pred_instances)
            if 'pred_panoptic_seg' in b:
                seen |= set(b.pred_panoptic_seg.sem_seg.unique().tolist())
                # Two queries are nearly equal along the edges, and their masks are random.
                maps = (x.pred_panoptic_seg.sem_seg for x in (a, b))
                check_maps(*maps, MAX_ERROR['panoptic'])
            if 'pred_sem_seg' in b:
                check_maps(a.pred_sem_seg.data, b.pred_sem_seg.data)
    if kind == 'panoptic':  # two objects of one map, classes without objects, and nothing
        assert max(seen) >= 2000 and seen & {3, 4} and 5 in seen


def test_low_scores_may_count_in_panoptic_maps(randomize):
    model, cfg = mask_model('panoptic', randomize)
    images = small_images(cfg)
    data = resized(images, [(128, 160)])
    model.panoptic_fusion_head.test_cfg.instance_on = False
    holes = []
    for model.panoptic_fusion_head.test_cfg.filter_low_score in (True, False):
        found = model.test_step(copy.deepcopy(data))[0].pred_panoptic_seg.sem_seg
        holes.append((found == 5).sum())
    assert holes[0] > holes[1]
    content, error = agreeing_onnx(model, images, (128, 160), False)
    assert error <= MAX_ERROR['panoptic']


def test_masks_that_nobody_wants(randomize):
    model, cfg = mask_model('instances', randomize)
    model.panoptic_fusion_head.test_cfg = dict(panoptic_on=False)
    with pytest.raises(ValueError, match='neither instances nor panoptic maps'):
        agreeing_onnx(model, small_images(cfg), (128, 160))


def test_boxes_around_masks():
    from mmdet.structures.mask import mask2bbox

    inside = torch.rand(1, 40, 11, 17, generator=torch.Generator().manual_seed(0)) > 0.97
    inside[:, 0] = False
    x, y = _extent(inside.float().amax(2)), _extent(inside.float().amax(3))
    boxes = torch.stack([x[0], y[0], x[1], y[1]], 2)
    assert torch.equal(boxes[0], mask2bbox(inside[0])) and not boxes[0, 0].any()
