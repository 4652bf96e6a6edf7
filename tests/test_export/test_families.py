"""What docs/models.md says of each family of models is what the code does."""

import re

import onnx
import pytest

from repa_mm.apis.features import head_inputs
from repa_mm.convert import Conversion
from repa_mm.export import ExportedModel, agreeing_onnx, int8, resized, whole_model, whole_onnx
from repa_mm.export.exporter import MAX_ERROR
from repa_mm.models import add_structures_
from repa_mm.reparam import ChannelIdleFFN, outermost
from tests.conftest import random_model

from .checks import check_file
from .conftest import without_bias_correction
from .zoo import (
    CHANNELS_,
    DETRS,
    EXPORT,
    HEADS_,
    IDLE,
    INT8,
    MASK_MODELS,
    OTHERS,
    TABLE,
    TASKS,
    mask_config,
    small_config,
    small_images,
    small_model,
)


def test_every_row_is_tested():
    assert {*TABLE} == {*TASKS, *DETRS, *MASK_MODELS, *OTHERS}
    assert all(re.match('yes|no', cell) for row in TABLE.values() for cell in row[EXPORT:])
    assert all((row[INT8] == 'yes') == row[EXPORT].startswith('yes') for row in TABLE.values())


def places(names):
    """Where in a model there are modules of these names, as the docs say it."""
    names = {'encoder' if '.encoder.' in f'.{name}' else name.split('.')[0] for name in names}
    return ', '.join(sorted(names)) or 'no'


@pytest.mark.parametrize('family', TABLE)
def test_what_becomes_narrower(family, tmp_path):
    model = random_model(small_config(family, tmp_path))
    data = model.data_preprocessor(resized(small_images(model.cfg), [(224, 256)]), False)
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
def test_products_in_8_bits(family, tmp_path, monkeypatch):
    """Weights are random, so that the file need not agree; other tests compare files."""
    cfg = small_config(family, tmp_path)
    masks = cfg.model.get('panoptic_head')
    if masks:
        masks.pixel_decoder.encoder.num_layers = masks.transformer_decoder.num_layers = 1
    model, data, found = small_model(cfg), [resized(small_images(cfg), [(128, 160)])], []

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


# Each is like another: a Cascade Mask R-CNN has what the first two have, RetinaNet, FCOS and GFL
# what the next two have.
LIKE_OTHERS = 'Faster R-CNN', 'Cascade R-CNN', 'ATSS', 'RTMDet', 'Conditional DETR', 'DAB-DETR'
# Those in TASKS are compared in test_runtime_model.
COMPARED = [
    pytest.param(family, marks=pytest.mark.slow if family in LIKE_OTHERS else [])
    for family in (*DETRS, *MASK_MODELS, *OTHERS)
]
# Height and width of the images of each batch. Detectors take several sizes, and in one batch maps
# have one row or column; batches of others have one label map's size.
SIZES = [[(150, 200)], [(128, 96)] * 3, [(65, 250)]]
OF_DETECTORS = [[(150, 200)], [(128, 96), (101, 160), (160, 130)], [(57, 250)], [(260, 60)] * 2]


@pytest.mark.parametrize('family', COMPARED)
def test_exports(family, tmp_path):
    # A Mask2Former on the small maps of a ResNet, on which its queries differ.
    cfg = mask_config(family) if family in MASK_MODELS else small_config(family, tmp_path)
    if family == 'DINO':
        cfg.model.data_preprocessor.pad_size_divisor = 32
    model, images = small_model(cfg), small_images(cfg)
    if not TABLE[family][EXPORT].startswith('yes'):
        with pytest.raises(ValueError, match='does not know how a'):
            agreeing_onnx(model, images, (128, 160))
        return
    is_dense = family in OTHERS and hasattr(model, 'bbox_head')
    if is_dense:  # a threshold of scores before they are multiplied by a centerness
        (found,) = model.test_step(resized(images, [(128, 160)]))
        threshold = float(found.pred_instances.scores.median())
        model.bbox_head.test_cfg.score_thr = threshold
        (found,) = model.test_step(resized(images, [(128, 160)]))
        below = (found.pred_instances.scores <= threshold).any()
        assert len(found.pred_instances) > 5 and below == (family in ('ATSS', 'FCOS'))
    content, error = agreeing_onnx(model, images, (128, 160))
    exported = ExportedModel(content, model.data_preprocessor)
    assert error <= MAX_ERROR[exported.session.metadata['task']][0]
    proto = onnx.load_from_string(content)
    onnx.checker.check_model(proto, full_check=True)
    assert {node.domain for node in proto.graph.node} == {''}
    assert proto.opset_import[0].version == 17
    has_levels = hasattr(model, 'gen_encoder_output_proposals') or family in MASK_MODELS
    assert has_levels == ('GridSample' in {node.op_type for node in proto.graph.node})
    of_several_sizes = hasattr(model, 'bbox_head') or hasattr(model, 'roi_head')
    batches = OF_DETECTORS if of_several_sizes else SIZES
    if is_dense:  # not those where two boxes overlap by the threshold, but for rounding
        batches = [[(128, 160), (96, 200)]]
    found = [x for sizes in batches for x in check_file(model, exported, images, sizes)]
    in_openvino = ExportedModel(content, model.data_preprocessor, 'f32')
    check_file(model, in_openvino, images, batches[1 % len(batches)])
    if family == 'Mask2Former':  # two objects of one map, classes without objects, and nothing
        seen = {i for x in found for i in x.pred_panoptic_seg.sem_seg.unique().tolist()}
        assert max(seen) >= 2000 and seen & {3, 4} and 5 in seen
