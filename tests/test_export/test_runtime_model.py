"""Exported whole models predict what ``model.test_step`` does."""

import copy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from mmdet.apis import inference_detector
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import Runner, runner
from mmengine.structures import InstanceData

from demo.dataset import write_digit_scenes
from repa_mm.apis.images import build_images
from repa_mm.apis.merge_checkpoint import reparameterize_checkpoint
from repa_mm.export import (
    ExportedModel,
    Session,
    agreeing_onnx,
    agreement,
    noise,
    resized,
    runner_for_exported,
    runtime_model,
    whole_model,
)
from repa_mm.io.configs import dataset_config, load_config
from repa_mm.search.search import copy_with_precision
from tests.conftest import random_model

from .checks import check_file, check_objects
from .conftest import program_of, write_config

# Height and width of the images of each batch.
BATCHES = dict(
    detection=[[(150, 200)], [(128, 96), (101, 160), (160, 130)], [(260, 170)] * 2],
    segmentation=[[(150, 200)], [(97, 133)] * 3],
    classification=[[(256, 224)], [(230, 300)] * 3],
)
TASKS = ('retinanet', 'mask_rcnn', 'upernet', 'slide', 'classifier')


@pytest.mark.parametrize('precision', [None, 'f32'], ids=['onnxruntime', 'openvino'])
@pytest.mark.parametrize('task', TASKS)
def test_agrees_with_test_step(task, precision, exported):
    config, _, model, file = exported(task)
    deployed = ExportedModel(file, model.data_preprocessor, precision)
    images = noise(load_config(config))
    assert task == 'classifier' or '"zero"' in deployed.session.metadata['classes']
    for sizes in BATCHES[deployed.session.metadata['task']]:
        check_file(model, deployed, images, sizes)


def test_options_in_openvino(exported, tmp_path, monkeypatch):
    """Are inputs, also of files that have them as constants, and of what the docs write."""
    import openvino

    monkeypatch.chdir(tmp_path)
    *_, file = exported('upernet')
    openvino.save_model(openvino.Core().read_model(file), 'model.xml')
    exec(program_of('sized').replace('model.onnx', file), {})
    image = np.random.default_rng(0).normal(size=(2, 3, 96, 128)).astype('f')
    expected = Session(file)(image, output_size=(120, 100))['labels']
    for path in ('model.xml', 'sized.xml'):
        session = Session(path, 'f32')
        assert session.options == ['output_size']
        assert session(image)['labels'].shape == (2, 96, 128)
        found = session(image, output_size=(120, 100))['labels']
        assert found.shape == (2, 120, 100) and (found == expected).mean() > 0.99


@pytest.mark.parametrize('precision', [None, 'f32'], ids=['onnxruntime', 'openvino'])
def test_threads_share_a_session(precision, exported):
    session = Session(exported('classifier')[3], precision)
    images = np.random.default_rng(0).normal(size=(4, 2, 3, 224, 224)).astype('f')
    expected = [session(x)['scores'] for x in images]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda i: session(images[i % 4])['scores'], range(80))]
    for i, scores in enumerate(found):
        np.testing.assert_allclose(scores, expected[i % 4], atol=1e-5)


def test_soft_masks(exported):
    """With a threshold below 0, masks are bytes, as MMDetection's."""
    config, _, model, file = exported('mask_rcnn')
    deployed = ExportedModel(file, model.data_preprocessor)
    deployed.session.metadata['mask_thr_binary'] = '-1'
    model = copy.deepcopy(model)
    model.roi_head.test_cfg.mask_thr_binary = -1
    data = resized(noise(load_config(config)), [(128, 160)])
    with torch.no_grad():
        expected, found = (m.test_step(copy.deepcopy(data))[0] for m in (model, deployed))
    expected, found = expected.pred_instances.masks, found.pred_instances.masks
    assert found.dtype == expected.dtype == torch.uint8 and len(expected.unique()) > 9
    difference = (found.sum(0).float() - expected.sum(0)).abs()  # whatever the order
    assert difference.mean() < 1 and agreement(model, deployed, [data], strict=True) > 0.98


def write_scenes(folder):
    """A folder with a few scenes of digits where the demo configs look."""
    write_digit_scenes(str(folder / 'data/demo'), num_train=4, num_val=4, size=160)
    return folder


@pytest.mark.parametrize(
    'task', ['retinanet', *(pytest.param(t, marks=pytest.mark.slow) for t in TASKS[1:4])]
)
def test_metrics_are_those_of_the_model(task, exported, monkeypatch, tmp_path):
    """Also by a config that names the file, for `mim test` and the codebase's own tools."""
    monkeypatch.chdir(write_scenes(tmp_path))
    config, checkpoint, _, file = exported(task)
    cfg = load_config(config)
    cfg.work_dir, cfg.load_from = str(tmp_path / 'work'), checkpoint
    expected = Runner.from_cfg(cfg).test()
    # The hook that merges has nothing to do here, wherever a config has it.
    hooks = dict(custom_hooks=[dict(type='ReparameterizeHook')])
    actual = runner_for_exported(load_config(config, hooks), file, cfg.work_dir).test()
    assert expected.keys() == actual.keys()
    for key, value in expected.items():
        assert abs(actual[key] - value) <= (1e-3 if 'coco' in key else 0.5), key
    program = program_of('tested').replace('CONFIG', config).replace('model.onnx', file)
    (tmp_path / 'exported.py').write_text(program)
    cfg = Config.fromfile(tmp_path / 'exported.py')
    cfg.work_dir, cfg.load_from = str(tmp_path / 'work'), checkpoint  # which the host loads
    monkeypatch.setattr(runner, 'get_device', lambda: 'meta')  # stands in for a GPU
    assert Runner.from_cfg(cfg).test() == actual


def test_preprocessors_on_a_gpu(exported):
    """The model that is compared may be there: its preprocessor is, too."""
    config, _, model, file = exported('retinanet')
    moved = copy.deepcopy(model.data_preprocessor)
    moved._device = torch.device('meta')  # where its images would go
    (data,) = noise(load_config(config))[:1]
    (expected,) = ExportedModel(file, model.data_preprocessor).test_step(copy.deepcopy(data))
    (found,) = ExportedModel(file, moved).test_step(data)
    assert torch.equal(found.pred_instances.bboxes, expected.pred_instances.bboxes)
    assert moved._device.type == 'meta'  # untouched


def test_the_preprocessor_of_a_whole_model_with_structures(exported, monkeypatch):
    """Is that of the model inside."""
    config, _, model, file = exported('retinanet')
    cfg = load_config(config)
    cfg.model = dict(type='Restructured', model=cfg.model)
    monkeypatch.setattr(runtime_model, 'Runner', SimpleNamespace(from_cfg=lambda cfg: cfg.model))
    found = MODELS.build(runner_for_exported(cfg, file)).data_preprocessor
    assert torch.equal(found.mean, model.data_preprocessor.mean)


def test_foreground_and_background_by_one_score(randomize, tmp_path):
    options = dict(num_classes=2, out_channels=1, loss_decode=dict(use_sigmoid=True))
    cfg = load_config(write_config('upernet', tmp_path, repa=False))
    cfg.merge_from_dict({'model.decode_head': options, 'model.auxiliary_head': None})
    model = randomize(random_model(cfg))
    images = [resized([data], [(96, 128)]) for data in noise(cfg)]
    logits = model.predict(model.data_preprocessor(images[0], False)['inputs'])
    model.decode_head.threshold = float(logits[0].seg_logits.data.sigmoid().median())
    content, error = agreeing_onnx(model, images, (96, 128))
    assert error <= 1e-3
    exported = ExportedModel(content, model.data_preprocessor)
    assert agreement(model, exported, images) > 0.99
    (found,) = exported.test_step(copy.deepcopy(images[0]))
    assert 0.3 < found.pred_sem_seg.data.float().mean() < 0.7
    model.decode_head.threshold = 1.0  # the file has its own
    assert agreement(model, exported, images) < 0.7


REFUSE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('torch', 'repa_mm') or name.startswith('mm'):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
"""
# After each program of the docs; OpenVINO computes in float32, as the file says.
AFTER = dict(
    steps='',
    served='found = dict(bboxes=boxes, scores=scores, labels=labels)\n',
    pasted='found["masks"] = [paste(*x) for x in zip(masks[0], found["bboxes"])]\n',
    openvino='assert options == dict(INFERENCE_PRECISION_HINT="f32") and known["mean"]\n'
    'assert np.allclose(scores, found["scores"], atol=1e-3)\n'
    'assert np.allclose(boxes / np.tile(scale, 2), found["bboxes"], atol=1e-2)\n',
    normalized='for x, right in ((pixels, True), (resized, False)):\n'
    '    scores = compiled({"image": x[None]})["scores"][0]\n'
    '    assert np.allclose(scores, found["scores"], atol=1e-3) == right\n'
    'np.savez("found.npz", **found)\n',
)


PAD = dict(type='Pad', pad_val=dict(img=(114, 110, 90)))
FIX = dict(type='FixShapeResize', width=250, height=130)


@pytest.mark.parametrize(
    'steps, error',
    [
        ([dict(type='mmdet.Resize', scale=(160, 120), keep_ratio=True)], None),
        ([dict(type='Resize', scale=(161, 123), keep_ratio=False)], None),
        (
            [dict(type='Resize', scale=(161, 123), keep_ratio=True), dict(PAD, size=(200, 180))],
            None,
        ),
        ([dict(type='Resize', scale_factor=0.7, keep_ratio=True), dict(PAD, size=(9, 180))], None),
        ([dict(type='Resize', scale_factor=(0.7, 0.6)), dict(type='Pad', size=(200, 180))], None),
        ([dict(FIX, keep_ratio=True, pad_val=7)], None),
        ([FIX], None),
        ([dict(PAD, pad_to_square=True)], 'pad_to_square'),
        ([dict(type='CenterCrop', crop_size=9)], 'CenterCrop'),
        ([dict(type='Resize', scale=(9, 9), interpolation='bicubic')], 'interpolation'),
    ],
)
def test_the_program_of_the_docs_does_what_the_test_pipeline_does(
    steps, error, built, tmp_path, monkeypatch
):
    """Or an error names what it does not know."""
    config, _, model = built('retinanet')
    image = np.random.default_rng(0).integers(0, 255, (175, 118, 3), np.uint8)
    cv2.imwrite(str(tmp_path / 'image.png'), image)
    cfg = load_config(config)
    load, *_, pack = dataset_config(cfg, 'test').pipeline
    dataset_config(cfg, 'test').pipeline = [load, *steps, pack]
    monkeypatch.setattr(model, 'cfg', cfg)
    known, batches = whole_model(model).metadata(), []

    def run(_, inputs):
        batches.append(inputs['image'])
        return [np.ones((1, 2, 4)), np.zeros((1, 2)), np.zeros((1, 2))]

    metadata = SimpleNamespace(custom_metadata_map=known)
    session = SimpleNamespace(get_modelmeta=lambda: metadata, run=run)
    monkeypatch.setattr('onnxruntime.InferenceSession', lambda file: session)
    program = program_of('steps') + program_of('served')
    program, names = program.replace('image.jpg', str(tmp_path / 'image.png')), {}
    if error:
        with pytest.raises((KeyError, TypeError), match=error):
            exec(program, names)
        return
    exec(program, names)
    data = pseudo_collate([build_images(cfg, 'test', str(tmp_path))[0]])
    expected = model.data_preprocessor(copy.deepcopy(data), False)['inputs'].numpy()
    height, width = data['inputs'][0].shape[1:]
    assert batches[0].shape == (1, 3, height, width)
    np.testing.assert_allclose(batches[0], expected[..., :height, :width], atol=1e-5)
    np.testing.assert_allclose(names['scale'], data['data_samples'][0].scale_factor, 1e-6)
    np.testing.assert_allclose(names['boxes'][0] * np.tile(names['scale'], 2), 1, 1e-6)


def test_programs_without_openmmlab(exported, tmp_path):
    """Those of docs/deploy.md, in a process that cannot import mm* or torch, find the same."""
    _, _, model, file = exported('mask_rcnn')
    program = REFUSE + ''.join(program_of(name) + after for name, after in AFTER.items())
    copy_with_precision(file, str(tmp_path / 'model.onnx'), 'f32')
    image = np.random.default_rng(0).integers(0, 255, (180, 240, 3), np.uint8)
    cv2.imwrite(str(tmp_path / 'image.png'), image)
    program = program.replace('image.jpg', 'image.png')
    result = subprocess.run(
        [sys.executable, '-I', '-c', program], cwd=tmp_path, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert not result.returncode, result.stderr
    init_default_scope('mmdet')
    expected = inference_detector(model, str(tmp_path / 'image.png')).pred_instances
    found = {name: torch.tensor(x) for name, x in np.load(tmp_path / 'found.npz').items()}
    number = int((found['labels'] >= 0).sum())
    assert result.stdout.count('\n') == int((found['scores'] >= 0.3).sum())
    check_objects(InstanceData(**{name: x[:number] for name, x in found.items()}), expected)


@pytest.mark.parametrize(
    'name, task, folder',
    [
        ('detector', 'retinanet', 'vis'),
        ('segmentor', 'upernet', 'vis'),
        ('classifier', 'classifier', ''),
    ],
)
def test_inferencers_of_the_docs(name, task, folder, built, tmp_path, monkeypatch):
    """On a merged checkpoint they predict what the training form does, and draw it."""
    config, checkpoint, model = built(task)
    reparameterize_checkpoint(config, checkpoint, str(tmp_path / 'merged.pth'))
    image = np.random.default_rng(0).integers(0, 255, (160, 224, 3), np.uint8)
    cv2.imwrite(str(tmp_path / 'image.png'), image)
    monkeypatch.chdir(tmp_path)
    program, names = program_of('merged') + program_of(name), {}
    exec(program.replace('image.jpg', 'image.png').replace('CONFIG', config), names)
    found = names['found']
    data = build_images(load_config(config), 'test', str(tmp_path))[0]
    with torch.no_grad():
        (expected,) = model.test_step(pseudo_collate([data]))
    if name == 'detector':
        found = {key: torch.tensor(found[key]) for key in ('bboxes', 'scores', 'labels')}
        check_objects(InstanceData(**found), expected.pred_instances)
    elif name == 'segmentor':
        assert len(np.unique(found)) > 1
        assert (found != expected.pred_sem_seg.data[0].numpy()).mean() < 1e-3
    else:
        np.testing.assert_allclose(found['pred_scores'], expected.pred_score, atol=1e-5)
    assert cv2.imread(str(tmp_path / 'outputs' / folder / 'image.png')).any()
