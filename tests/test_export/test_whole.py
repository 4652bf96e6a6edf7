"""Exported whole models predict what ``model.test_step`` does."""

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import repa_mm
from repa_mm.run import init_model, load_config

from .test_tools.cases import DETECTOR, SEGMENTOR, tiny

pytest.importorskip('onnx')
pytest.importorskip('onnxruntime')
pytest.importorskip('mmdet')
pytest.importorskip('mmseg')

from repa_mm.export.detection import decode, suppress  # noqa: E402
from repa_mm.export.export import OPSETS, export_whole, lost_objects  # noqa: E402
from repa_mm.export.exported import (  # noqa: E402
    ExportedModel,
    export_checkpoint,
    model_to_export,
    runner_for_exported,
)
from repa_mm.export.session import Session, paste_masks  # noqa: E402
from repa_mm.export.whole import AveragePool, whole_model  # noqa: E402

ROOT = Path(__file__).parents[1]
MASK_RCNN = dict(
    base='demo/{}mask_rcnn{}_swin_digits.py',
    more='',
    heads='neck=dict(in_channels=[24, 48, 96, 192], out_channels=32), '
    'rpn_head=dict(in_channels=32, feat_channels=32), '
    'roi_head=dict(bbox_roi_extractor=dict(out_channels=32), '
    'bbox_head=dict(in_channels=32, fc_out_channels=32), '
    'mask_roi_extractor=dict(out_channels=32), '
    'mask_head=dict(in_channels=32, conv_out_channels=32)), '
    'test_cfg=dict(rpn=dict(nms_pre=200, max_per_img=60), rcnn=dict(score_thr=0.02))',
)
CLASSIFIER = """
_base_ = {base!r}
model = dict(
    backbone=dict(arch=dict(_delete_=True, embed_dims=24, depths=[1, 1, 1, 1],
                            num_heads=[1, 2, 2, 2])),
    head=dict(num_classes=7, in_channels=192))
"""
TASKS = ('retinanet', 'mask_rcnn', 'upernet', 'classifier')
# Height and width of the images of each batch.
BATCHES = dict(
    detection=[[(150, 200)], [(128, 96), (101, 160), (160, 130)], [(260, 170)] * 2],
    segmentation=[[(150, 200)], [(97, 133)] * 3],
    classification=[[(256, 224)], [(230, 300)] * 3],
)


def config_of(task, folder, repa=True):
    """A config of a very small model."""
    path = folder / f'{task}_{"repa" if repa else "vanilla"}.py'
    if task == 'classifier':
        base = 'repa_swin_t_in1k.py' if repa else 'swin_t_in1k.py'
        path.write_text(CLASSIFIER.format(base=repa_mm.config_path(base)))
    else:
        parts = dict(retinanet=DETECTOR, mask_rcnn=MASK_RCNN, upernet=SEGMENTOR)[task]
        path.write_text(tiny(**parts, repa=repa))
    return str(path)


@pytest.fixture(scope='session')
def exported(tmp_path_factory):
    """A function: config, model and exported file of a task, made once."""
    from .conftest import _randomize

    folder, made = tmp_path_factory.mktemp('exported'), {}

    def get(task, repa=True, preprocessing=False):
        key = task, repa, preprocessing
        if key not in made:
            config = config_of(task, folder, repa)
            torch.manual_seed(0)
            model = init_model(config)
            _randomize(model)
            name = '_'.join(map(str, key))
            checkpoint, out = (str(folder / f'{name}.{suffix}') for suffix in ('pth', 'onnx'))
            torch.save(dict(state_dict=model.state_dict()), checkpoint)
            export_checkpoint(config, checkpoint, out, preprocessing=preprocessing)
            made[key] = config, checkpoint, model, out
        return made[key]

    return get


def batch_of(scope, sizes, scale=1.0):
    """What a data loader gives: pixels, and what is known of the images."""
    from .test_models.test_detectors import sample

    generator = torch.Generator().manual_seed(sizes[0][0])
    images, samples = [], []
    for height, width in sizes:
        coarse = torch.rand(1, 3, 9, 12, generator=generator) * 255
        image = torch.nn.functional.interpolate(coarse, (height, width), mode='bicubic')[0]
        images.append(image.clamp(0, 255).byte())
        found = sample(load_config_scope(scope), height, width)
        found.set_metainfo(
            dict(
                ori_shape=(round(height / scale), round(width / scale)), scale_factor=(scale, scale)
            )
        )
        samples.append(found)
    return dict(inputs=images, data_samples=samples)


def load_config_scope(scope):
    return type('Config', (), dict(default_scope=scope))


def check_objects(actual, expected):
    """Every object has a counterpart."""
    assert len(actual) == len(expected) > 5
    boxes = (expected.bboxes[:, None] - actual.bboxes).abs().amax(2)
    fits = (boxes < 1e-2) & (expected.labels[:, None] == actual.labels)
    fits &= (expected.scores[:, None] - actual.scores).abs() < 1e-4
    assert fits.any(1).all() and fits.any(0).all()
    if 'masks' in expected:
        actual_masks = actual.masks[fits.int().argmax(1)]
        assert expected.masks.any()
        assert (actual_masks != expected.masks).float().mean() < 1e-3


# Task, preprocessing in the graph, RePa or vanilla.
CASES = [
    pytest.param(*case, marks=pytest.mark.slow)
    if case[0] != 'retinanet' and case[1:] != (0, 1)
    else case
    for case in [(task, *how) for task in TASKS for how in ((0, 1), (1, 1), (0, 0))]
]


@pytest.mark.parametrize('task, preprocessing, repa', CASES)
def test_agrees_with_test_step(task, preprocessing, repa, exported):
    config, _, model, file = exported(task, bool(repa), preprocessing=bool(preprocessing))
    cfg = load_config(config)
    deployed = ExportedModel(file, dict(cfg.model.data_preprocessor))
    kind = deployed.session.metadata['task']
    for sizes in BATCHES[kind]:
        for scale in (1.0, 0.8):
            data = [batch_of(cfg.default_scope, sizes, scale) for _ in range(2)]
            with torch.no_grad():
                expected = model.test_step(data[0])
            actual = deployed.test_step(data[1])
            for a, b in zip(actual, expected, strict=True):
                if kind == 'detection':
                    check_objects(a.pred_instances, b.pred_instances)
                elif kind == 'segmentation':
                    a, b = a.pred_sem_seg.data, b.pred_sem_seg.data
                    assert len(b.unique()) > 1
                    assert a.shape == b.shape and (a != b).float().mean() <= 1e-3
                else:
                    assert torch.allclose(a.pred_score, b.pred_score, atol=1e-5)
                    assert a.pred_label == b.pred_label


def test_average_pool_is_the_adaptive_one(randomize):
    x = torch.randn(2, 3, 13, 22, dtype=torch.float64)
    for size in [(1, 1), (2, 2), (3, 5), (6, 6), (13, 22)]:
        expected = torch.nn.AdaptiveAvgPool2d(size)(x)
        torch.testing.assert_close(AveragePool(size)(x), expected)


def test_boxes_are_decoded_as_by_the_coder():
    from mmdet.models.task_modules.coders import DeltaXYWHBBoxCoder

    generator = torch.Generator().manual_seed(0)
    boxes = torch.rand(50, 4, generator=generator).cumsum(1)[:, [0, 1, 2, 3]] * 60
    boxes = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1)
    deltas = torch.randn(50, 4, generator=generator) * 5
    size = torch.tensor([[120.0, 90.0, 120.0, 90.0]])
    for options in (
        dict(),
        dict(target_means=(0.1, 0.2, 0.3, 0.4), target_stds=(0.1, 0.1, 0.2, 0.2)),
        dict(clip_border=False),
        dict(add_ctr_clamp=True, ctr_clamp=8),
    ):
        coder = DeltaXYWHBBoxCoder(**options)
        expected = coder.decode(boxes, deltas, max_shape=(90, 120))
        torch.testing.assert_close(decode(coder, boxes, deltas, size), expected)


def test_suppression_is_that_of_mmcv():
    from mmcv.ops import batched_nms

    generator = torch.Generator().manual_seed(0)
    boxes = torch.rand(1, 80, 4, generator=generator) * 40
    boxes[..., 2:] += boxes[..., :2]
    scores = torch.rand(1, 3, 80, generator=generator)
    kept = suppress(boxes, scores, 0.5, 0.1, 80)
    flat = scores.flatten()
    index = (flat > 0.1).nonzero()[:, 0]
    found, keep = batched_nms(
        boxes[0].repeat(3, 1)[index], flat[index], index // 80, dict(type='nms', iou_threshold=0.5)
    )
    expected = torch.full((240,), -1.0)
    expected[index[keep]] = found[:, 4]
    assert torch.equal(kept.flatten(), expected) and 0 < len(keep) < 240


def test_masks_are_pasted_as_by_the_head():
    from mmdet.models.roi_heads.mask_heads.fcn_mask_head import _do_paste_mask

    generator = torch.Generator().manual_seed(0)
    masks = torch.rand(6, 28, 28, generator=generator)
    boxes = torch.rand(6, 4, generator=generator) * 40
    boxes[:, 2:] += boxes[:, :2] + 1
    boxes[5] = torch.tensor([3.0, 4.0, 3.0, 20.0])  # nothing in it
    expected = _do_paste_mask(masks[:, None], boxes, 70, 90, skip_empty=False)[0] >= 0.5
    assert torch.equal(paste_masks(masks, boxes, 70, 90)[:5], expected[:5])
    assert expected[:5].flatten(1).any(1).all()


def test_images_without_objects(exported, tmp_path):
    """Not one box, in a batch and alone."""
    config, checkpoint, *_ = exported('mask_rcnn')
    model = model_to_export(config, checkpoint)
    model.roi_head.test_cfg.score_thr = 0.999
    out = str(tmp_path / 'model.onnx')
    export_whole(whole_model(model), out, (128, 160))
    found = Session(out)(np.zeros((2, 3, 96, 130), np.float32))
    assert (found['labels'] == -1).all() and not found['boxes'].any() and not found['masks'].any()


def test_only_standard_operators(exported):
    import onnx

    proto = onnx.load(exported('mask_rcnn')[3])
    onnx.checker.check_model(proto, full_check=True)
    kinds = {node.op_type for node in proto.graph.node}
    assert {'NonMaxSuppression', 'RoiAlign'} <= kinds
    assert {node.domain for node in proto.graph.node} == {''}


@pytest.mark.slow
@pytest.mark.parametrize('opset', [OPSETS[0], OPSETS[-1]])
def test_opsets(opset, exported, tmp_path):
    import onnx

    config, checkpoint, *_ = exported('mask_rcnn')
    out = str(tmp_path / 'model.onnx')
    export_checkpoint(config, checkpoint, out, opset=opset)
    assert onnx.load(out).opset_import[0].version == opset


def test_of_one_size(exported, tmp_path):
    config, checkpoint, *_ = exported('retinanet')
    out = str(tmp_path / 'model.onnx')
    export_checkpoint(config, checkpoint, out, (96, 160), dynamic=False)
    session = Session(out)
    assert session(np.zeros((1, 3, 96, 160), np.float32))['boxes'].shape[0] == 1
    with pytest.raises(ValueError, match=r'exported for images of shape \(1, 3, 96, 160\), but'):
        session(np.zeros((1, 3, 128, 160), np.float32))


BAD_IMAGES = [
    (np.zeros((1, 1, 64, 64), np.float32), 'takes images of 3 channels'),
    (np.zeros((1, 4, 64, 64), np.float32), 'takes images of 3 channels'),
    (np.zeros((3, 64, 64), np.float32), 'takes images of 3 channels'),
    (np.zeros((1, 3, 64, 64), np.uint8), 'takes images of type float32, but got uint8'),
]


@pytest.mark.parametrize('image, message', BAD_IMAGES)
def test_bad_images(image, message, exported):
    with pytest.raises(ValueError, match=message):
        Session(exported('retinanet')[3])(image)


UNSUPPORTED = [
    ('retinanet', {'model.test_cfg.nms.type': 'soft_nms'}, "nms.type 'soft_nms'"),
    ('retinanet', {'model.test_cfg.nms.class_agnostic': True}, 'class_agnostic'),
    ('retinanet', {'model.test_cfg.min_bbox_size': 4}, 'min_bbox_size above 0'),
    ('retinanet', {'model.test_cfg.nms_pre': -1}, 'nms_pre of bbox_head must be positive'),
    ('retinanet', {'model.bbox_head.type': 'ATSSHead'}, 'bbox_head of type ATSSHead'),
    (
        'retinanet',
        {'model.bbox_head.bbox_coder.type': 'LegacyDeltaXYWHBBoxCoder'},
        'LegacyDeltaXYWHBBoxCoder',
    ),
    ('mask_rcnn', {'model.roi_head.type': 'MaskScoringRoIHead'}, 'type MaskScoringRoIHead'),
    (
        'mask_rcnn',
        {'model.roi_head.bbox_roi_extractor.roi_layer.pool_mode': 'max'},
        'only RoIAlign by average',
    ),
    ('upernet', {'model.test_cfg.mode': 'slide'}, "test_cfg.mode 'slide'"),
    (
        'upernet',
        {'model.data_preprocessor.test_cfg.size_divisor': 32},
        'data_preprocessor.test_cfg',
    ),
]


@pytest.mark.parametrize('task, options, message', UNSUPPORTED)
def test_what_is_not_supported_is_named(task, options, message, tmp_path):
    cfg = load_config(config_of(task, tmp_path), options)
    if 'roi_head.type' in str(options):
        cfg.model.roi_head.mask_iou_head = dict(
            type='MaskIoUHead', num_convs=1, num_fcs=1, roi_feat_size=14, in_channels=32,
            conv_out_channels=8, fc_out_channels=8, num_classes=10,
        )  # fmt: skip
    if 'ATSS' in str(options):
        cfg.model.bbox_head.anchor_generator = dict(
            type='AnchorGenerator', ratios=[1.0], octave_base_scale=8, scales_per_octave=1,
            strides=[8, 16, 32],
        )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        whole_model(init_model(cfg))


@pytest.fixture
def run_tool(monkeypatch):
    def run(tool, *args):
        monkeypatch.setattr(sys, 'argv', [tool, *map(str, args)])
        runpy.run_path(str(ROOT / 'tools' / tool), run_name='__main__')

    return run


def test_bad_requests(exported, tmp_path, run_tool):
    config, checkpoint, _, file = exported('retinanet')
    out = tmp_path / 'model.onnx'
    out.write_text('old')
    for args, message in (
        ((out, '--opset', '9'), 'opset 9 is not supported: choose one from 16 to 20'),
        ((out, '--opset', '99'), 'opset 99 is not supported'),
        ((out, '--shape', '0', '96'), 'sizes must be positive'),
        ((out, '--preprocessing', '--backbone'), '--preprocessing is for whole models'),
        ((tmp_path / 'model.pt', '--preprocessing'), '--preprocessing is for whole models'),
        ((out, '--opset', '18', '--backbone'), '--opset is for whole models'),
    ):
        with pytest.raises(SystemExit, match=f'error: {message}') as end:
            run_tool('export.py', config, checkpoint, *args)
        assert '\n' not in str(end.value)
    with pytest.raises(SystemExit, match='error:'):
        run_tool('export.py', config, file, out)
    assert out.read_text() == 'old' and list(tmp_path.iterdir()) == [out]


def test_backbones_stay_an_option(exported, tmp_path, run_tool, capsys):
    config, checkpoint, *_ = exported('retinanet')
    out = str(tmp_path / 'model.onnx')
    run_tool('export.py', config, checkpoint, out, '--backbone')
    assert 'wrote the backbone' in capsys.readouterr().out
    with pytest.raises(ValueError, match='is no whole model of tools/export.py'):
        Session(out)
    run_tool('export.py', config, checkpoint, out)
    assert 'wrote the whole detector' in capsys.readouterr().out
    assert Session(out).metadata['task'] == 'detection'


def test_not_exported_files(exported, tmp_path):
    with pytest.raises(FileNotFoundError, match='no exported model at'):
        Session(str(tmp_path / 'none.onnx'))
    (tmp_path / 'text.onnx').write_text('text')
    with pytest.raises(ValueError, match='ONNX Runtime cannot read'):
        Session(str(tmp_path / 'text.onnx'))
    with pytest.raises(ValueError, match="the suffix of 'model.pth' is none of .onnx"):
        Session('model.pth')


def test_an_example_without_openmmlab(exported, tmp_path):
    """The program of docs/deploy.md, in a process that cannot import mm* or torch."""
    import cv2

    docs = (ROOT / 'docs' / 'deploy.md').read_text()
    program = docs.split('<!-- served -->')[1].split('```python\n')[1].split('```')[0]
    assert program.count('\n') <= 20
    cv2.imwrite(
        str(tmp_path / 'image.jpg'),
        np.random.default_rng(0).integers(0, 255, (180, 240, 3), np.uint8),
    )
    file = exported('mask_rcnn', preprocessing=True)[3]
    program = program.replace("'model.onnx'", repr(file))
    refuse = (
        'import sys\n'
        'class Refuse:\n'
        '    def find_spec(self, name, path=None, target=None):\n'
        "        if name.split('.')[0] in ('torch', 'repa_mm') or name.startswith('mm'):\n"
        '            raise ImportError(name)\n'
        'sys.meta_path.insert(0, Refuse())\n'
    )
    result = subprocess.run(
        [sys.executable, '-I', '-c', refuse + program], cwd=tmp_path, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert not result.returncode, result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize(
    'task', ['retinanet', *(pytest.param(t, marks=pytest.mark.slow) for t in TASKS[1:3])]
)
def test_metrics_are_those_of_the_model(task, exported, digits_for_tests, monkeypatch, tmp_path):
    from repa_mm.run import runner_for_testing

    monkeypatch.chdir(digits_for_tests)
    config, checkpoint, _, file = exported(task)
    work_dir = str(tmp_path / 'work')
    expected = runner_for_testing(config, checkpoint, work_dir).test()
    actual = runner_for_exported(config, file, work_dir).test()
    assert expected.keys() == actual.keys()
    for key, value in expected.items():
        assert abs(actual[key] - value) <= (0.5 if task == 'upernet' else 1e-3), key


@pytest.fixture(scope='session')
def digits_for_tests(tmp_path_factory):
    pytest.importorskip('sklearn')
    pytest.importorskip('skimage')
    from repa_mm.demo.dataset import write_digit_scenes

    folder = tmp_path_factory.mktemp('user')
    write_digit_scenes(str(folder / 'data/demo'), num_train=8, num_val=4, size=160)
    return folder


def test_files_of_another_config(exported, digits_for_tests, monkeypatch, tmp_path, run_tool):
    monkeypatch.chdir(digits_for_tests)
    config = exported('retinanet')[0]
    with pytest.raises(SystemExit, match='is a model for segmentation, but the config'):
        run_tool('test_exported.py', config, exported('upernet')[3])
    with pytest.raises(SystemExit, match='no exported model at'):
        run_tool('test_exported.py', config, 'none.onnx')
    other = tmp_path / 'other.py'
    other.write_text(
        f'_base_ = {config!r}\ntest_dataloader = dict(dataset=dict(metainfo=dict('
        "classes=('cat', 'dog'))))\n"
    )
    with pytest.raises(SystemExit, match=r'knows 10 classes .* has 2 \(cat, dog'):
        run_tool('test_exported.py', other, exported('retinanet')[3])
    names = init_model(config).cfg.test_dataloader.dataset.metainfo.classes
    other.write_text(
        f'_base_ = {config!r}\ntest_dataloader = dict(dataset=dict(metainfo=dict('
        f'classes={tuple(reversed(names))!r})))\n'
    )
    with pytest.raises(SystemExit, match=f'in another order .* class 0 is {names[0]!r} in the fi'):
        run_tool('test_exported.py', other, exported('retinanet')[3])


def test_a_precision_is_of_openvino(exported):
    with pytest.raises(ValueError, match='a precision is for .xml files'):
        Session(exported('retinanet')[3], 'bf16')


def test_objects_without_counterparts_are_counted():
    boxes = torch.tensor([[[0.0, 0.0, 9.0, 9.0], [5.0, 5.0, 20.0, 20.0], [0.0] * 4]])
    scores, labels = torch.tensor([[0.9, 0.5, 0.0]]), torch.tensor([[1, 2, -1]])
    found = [boxes, scores, labels, torch.rand(1, 3, 4, 4)]
    assert lost_objects(found, found) == 0
    for i, change in ((0, 1.0), (1, 0.1), (2, 1), (3, 0.5)):
        others = [x.clone() for x in found]
        others[i][0, 1] += change
        assert lost_objects(found, others) == 0.5
    others = [x.clone() for x in found]
    others[1][0, 0] = torch.nan
    assert lost_objects(found, others) == 0.5


@pytest.mark.parametrize('bias', ['boxes', 'scores'])
def test_trained_detectors_are_compared_too(bias, exported, tmp_path):
    """A file that differs is refused, even if no box is above the threshold of the scores."""
    config, checkpoint, *_ = exported('retinanet')
    whole = whole_model(model_to_export(config, checkpoint))
    whole.predict.cfg['score_thr'] = 0.99
    out = tmp_path / 'model.onnx'
    assert export_whole(whole, str(out), (128, 160)) <= 0.02
    assert (Session(str(out))(np.zeros((1, 3, 64, 64), np.float32))['labels'] == -1).all()
    out.unlink()
    head = whole.predict.head
    layer = head.retina_reg if bias == 'boxes' else head.retina_cls
    calls = []

    def drift(module, args, output):  # another model than was traced, from the second run on
        calls.append(module)
        return output + 0.1 * (len(calls) > 3)

    layer.register_forward_hook(drift)
    with pytest.raises(ValueError, match='differs from PyTorch by .*nothing is written'):
        export_whole(whole, str(out), (128, 160))
    assert not out.exists()


def test_masks_of_probabilities_have_no_metric(exported, tmp_path):
    import onnx

    model = onnx.load(exported('mask_rcnn')[3])
    (threshold,) = (x for x in model.metadata_props if x.key == 'mask_thr_binary')
    threshold.value = '-1'
    file = str(tmp_path / 'soft.onnx')
    onnx.save(model, file)
    with pytest.raises(ValueError, match='mask_thr_binary=-1, for masks of probabilities'):
        ExportedModel(file)
