"""What docs/models.md says of each family of models is what the code does."""

import re
from ast import literal_eval
from pathlib import Path

import pytest

from repa_mm.apis.features import head_inputs
from repa_mm.convert import Conversion
from repa_mm.export import (
    ExportedModel,
    agreeing_onnx,
    agreement,
    int8,
    resized,
    whole_model,
    whole_onnx,
)
from repa_mm.io.configs import load_config
from repa_mm.models import add_structures_
from repa_mm.reparam import ChannelIdleFFN, outermost
from tests.conftest import random_model

from .conftest import HEADS, without_bias_correction, write_config
from .test_transformers import DETECTORS, MASK_MODELS, detector, mask_model, small_images, spread

pytest.importorskip('onnxruntime')
pytest.importorskip('mmdet')
pytest.importorskip('mmseg')

SWIN = dict(type='mmdet.SwinTransformer', embed_dims=8, depths=[1] * 4, num_heads=[1, 1, 2, 2])
CHANNELS = [8, 16, 32, 64]
FPN = dict(in_channels=CHANNELS, out_channels=32)
DENSE = dict(num_classes=5, in_channels=32, feat_channels=32, stacked_convs=1)
RPN = dict(in_channels=32, feat_channels=32)
ROI = dict(in_channels=32, fc_out_channels=16, num_classes=5)
STAGES = dict.fromkeys('012', ROI)
EXTRACTOR = dict(out_channels=32)
TWO_STAGE = dict(neck=FPN, rpn_head=RPN, test_cfg=dict(rpn=dict(nms_pre=200, max_per_img=60)))
GROUPS = dict(norm_cfg=dict(num_groups=4))

# Families whose exports are compared in other tests: what builds them there, and its argument.
TESTED = {
    'RetinaNet': ('write_config', 'retinanet'),
    'Mask R-CNN': ('write_config', 'mask_rcnn'),
    'DETR': ('detector', 'detr'),
    'Conditional DETR': ('detector', 'conditional_detr'),
    'DAB-DETR': ('detector', 'dab_detr'),
    'Deformable DETR': ('detector', 'deformable_detr'),
    'DINO': ('detector', 'dino'),
    'Mask2Former': ('mask_model', 'panoptic'),
    'UperNet': ('write_config', 'upernet'),
    'Mask2Former of MMSegmentation': ('mask_model', 'semantic'),
    'Classifiers': ('write_config', 'classifier'),
}
# The others: an installed config, and what makes the model very small.
OTHERS = {
    'Faster R-CNN': (
        'mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py',
        dict(TWO_STAGE, roi_head=dict(bbox_roi_extractor=EXTRACTOR, bbox_head=ROI)),
    ),
    'Cascade R-CNN': (
        'mmdet::cascade_rcnn/cascade-rcnn_r50_fpn_1x_coco.py',
        dict(TWO_STAGE, roi_head=dict(bbox_roi_extractor=EXTRACTOR, bbox_head=STAGES)),
    ),
    'Cascade Mask R-CNN': (
        'mmdet::cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco.py',
        dict(
            TWO_STAGE,
            roi_head=dict(
                bbox_roi_extractor=EXTRACTOR,
                # Boxes of each class are refined by those of the best class.
                bbox_head={k: dict(v, reg_class_agnostic=False) for k, v in STAGES.items()},
                mask_roi_extractor=EXTRACTOR,
                mask_head=dict(in_channels=32, conv_out_channels=16, num_classes=5),
            ),
        ),
    ),
    'ATSS': ('mmdet::atss/atss_r50_fpn_1x_coco.py', dict(neck=FPN, bbox_head=DENSE)),
    'FCOS': ('mmdet::fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py', dict(neck=FPN, bbox_head=DENSE)),
    'GFL': ('mmdet::gfl/gfl_r50_fpn_1x_coco.py', dict(neck=FPN, bbox_head=DENSE)),
    'RTMDet': (
        'mmdet::rtmdet/rtmdet_l_swin_b_4xb32-100e_coco.py',
        dict(
            neck=dict(GROUPS, in_channels=CHANNELS[1:], out_channels=32, num_csp_blocks=1),
            bbox_head=dict(GROUPS, **DENSE),
        ),
    ),
    'DDQ': (
        'mmdet::ddq/ddq-detr-4scale_r50_8xb2-12e_coco.py',
        dict(
            neck=dict(in_channels=CHANNELS[1:]),
            num_queries=25,
            encoder=dict(num_layers=1),
            decoder=dict(num_layers=2),
            bbox_head=dict(num_classes=5),
            test_cfg=dict(max_per_img=20),
        ),
    ),
    'SegFormer': (
        'mmseg::segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512.py',
        dict(
            backbone=dict(embed_dims=8, num_layers=[1] * 4, num_heads=[1, 1, 2, 2]),
            decode_head=dict(in_channels=[8, 8, 16, 16], channels=16, num_classes=5),
        ),
    ),
    'Segmenter': (
        'mmseg::segmenter/segmenter_vit-t_mask_8xb1-160k_ade20k-512x512.py',
        dict(
            backbone=dict(img_size=(64, 64), embed_dims=32, num_layers=2, num_heads=2),
            decode_head=dict(
                in_channels=32, channels=32, embed_dims=32, num_layers=1, num_heads=2, num_classes=5
            ),
            test_cfg=dict(crop_size=(96, 96), stride=(64, 64)),
        ),
    ),
}


def table():
    """Rows of the docs: what is said of channels, heads, channel idle, export and int8."""
    text = (Path(__file__).parents[2] / 'docs' / 'models.md').read_text()
    _, text = re.split(r'\n\| family \|.*\n\| --- .*\n', text)
    rows = text[: text.index('\n\n')].splitlines()
    cells = ([x.strip() for x in row[1:-1].split('|')] for row in rows)
    return {name: row[1:] for row in cells for name in row[0].split(', ')}


TABLE = table()
CHANNELS_, HEADS_, IDLE, EXPORT, INT8 = range(5)


def small_config(family, folder, randomize):
    """The config of a very small model with a transformer for a backbone."""
    how, name = TESTED.get(family, (None, None))
    if how == 'write_config':
        assert name in HEADS
        return load_config(write_config(name, folder, repa=False))
    if how:
        assert name in (DETECTORS if how == 'detector' else MASK_MODELS)
        cfg = (detector if how == 'detector' else mask_model)(name, randomize)[1]
    else:
        path, options = OTHERS[family]
        cfg = load_config(path)
        cfg.merge_from_dict(dict(model=options))
    # An option that the docs name.
    for key, value in re.findall(r'`([\w.]+)=([^`]+)`', TABLE[family][EXPORT]):
        cfg.merge_from_dict({f'model.{key}': literal_eval(value)})
    cfg.model.pop('pretrained', None)
    cfg.model.pop('init_cfg', None)
    if family not in ('SegFormer', 'Segmenter'):
        cfg.model.backbone = dict(SWIN, out_indices=cfg.model.backbone.out_indices)
    return cfg


def test_every_row_is_tested():
    assert set(TABLE) == {*TESTED, *OTHERS}
    assert all(re.match('yes|no', cell) for row in TABLE.values() for cell in row[EXPORT:])
    assert all(TABLE[family][EXPORT].startswith('yes') for family in TESTED)
    assert all((row[INT8] == 'yes') == row[EXPORT].startswith('yes') for row in TABLE.values())


def places(names):
    """Where in a model there are modules of these names, as the docs say it."""
    names = {'encoder' if '.encoder.' in f'.{name}' else name.split('.')[0] for name in names}
    return ', '.join(sorted(names)) or 'no'


@pytest.mark.parametrize('family', TABLE)
def test_what_becomes_narrower(family, tmp_path, randomize):
    cfg = small_config(family, tmp_path, randomize)
    model = random_model(cfg)
    data = model.data_preprocessor(resized(small_images(cfg), [(224, 256)]), False)
    parts = Conversion(model, [data], forward=head_inputs).parts
    heads = [name for name, part in parts.items() if len(part.sizes) == 2]
    assert places({*parts} - {*heads}) == TABLE[family][CHANNELS_]
    assert places(heads) == TABLE[family][HEADS_]
    try:
        add_structures_(model, [dict(type='ChannelIdle', idle_ratio=0.75)])
    except ValueError:
        assert not list(outermost(model, ChannelIdleFFN))
    assert places(name for name, _ in outermost(model, ChannelIdleFFN)) == TABLE[family][IDLE]


# NNCF takes seconds for each layer; a RetinaNet is in test_int8.
QUICK = ('Segmenter',)
IN_8_BITS = [
    pytest.param(family, marks=[] if family in QUICK else pytest.mark.slow)
    for family, row in TABLE.items()
    if row[INT8] == 'yes'
]


@pytest.mark.parametrize('family', IN_8_BITS)
def test_products_in_8_bits(family, tmp_path, randomize, monkeypatch):
    """Weights are random, so that the file need not agree; other tests compare files."""
    pytest.importorskip('nncf')
    cfg = small_config(family, tmp_path, randomize)
    masks = cfg.model.get('panoptic_head')
    if masks:
        masks.pixel_decoder.encoder.num_layers = masks.transformer_decoder.num_layers = 1
    model = spread(randomize(random_model(cfg)))
    data = [resized(small_images(cfg), [(128, 160)])]
    found = []

    def agreement(model, exported, held_out, **kwargs):
        found.extend(exported.test_step(held_out[0]))
        return 1.0

    def export(model, images):
        return whole_onnx(whole_model(model), (2, 3, 128, 160)), 0.0

    monkeypatch.setattr(int8, 'agreement', agreement)
    monkeypatch.setattr(int8, 'agreeing_onnx', export)
    without_bias_correction(monkeypatch)
    eight = int8.quantize(model, str(tmp_path / 'model.xml'), data, data)['layers'].values()
    assert len(found) == len(data[0]['inputs']) and sum(eight) > 0.8 * len(eight)


# A Cascade Mask R-CNN has what the first two have, RetinaNet, FCOS and GFL what the others have.
FEWER = 'Faster R-CNN', 'Cascade R-CNN', 'ATSS', 'RTMDet'
COMPARED = [pytest.param(x, marks=pytest.mark.slow if x in FEWER else []) for x in OTHERS]


@pytest.mark.parametrize('family', COMPARED)
def test_exports_that_no_other_test_compares(family, tmp_path, randomize):
    cfg = small_config(family, tmp_path, randomize)
    model = spread(randomize(random_model(cfg)))
    images = small_images(cfg)
    (found,) = model.test_step(resized(images, [(128, 160)]))
    if family in ('SegFormer', 'Segmenter'):
        assert len(found.pred_sem_seg.data.unique()) > 1
    else:
        assert len(found.pred_instances) > 5
    if not TABLE[family][EXPORT].startswith('yes'):
        with pytest.raises(ValueError, match='does not know how a'):
            agreeing_onnx(model, images, (128, 160))
        return
    if hasattr(model, 'bbox_head'):
        # Of scores before they are multiplied by a centerness.
        threshold = float(found.pred_instances.scores.median())
        model.bbox_head.test_cfg.score_thr = threshold
    content, error = agreeing_onnx(model, images, (128, 160))
    assert error <= 1e-3
    if hasattr(model, 'bbox_head'):
        data = resized(images, [(128, 160), (96, 200)])
        file = ExportedModel(content, model.data_preprocessor)
        assert agreement(model, file, [data], strict=True) >= 1 - 1e-3
        (found,) = model.test_step(resized(images, [(128, 160)]))
        below = (found.pred_instances.scores <= threshold).any()
        assert len(found.pred_instances) > 5 and below == (family in ('ATSS', 'FCOS'))
