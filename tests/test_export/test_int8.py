"""Files in 8 bits and in bf16 find what the model finds, or are not written."""

import copy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.registry import MODELS

from repa_mm.apis import open_model
from repa_mm.export import ExportedModel, agreement, int8
from repa_mm.io.configs import load_config
from tests.conftest import random_model
from tests.test_export.conftest import without_bias_correction, write_config
from tests.test_export.rectangles import batch, train
from tests.test_export.zoo import detr_config, spread

# Iterations, learning rate, and the agreement of very small models that have trained for seconds.
# Without 8-bit products (VNNI) a processor's sums of pairs saturate, and files agree less.
CPUINFO = Path('/proc/cpuinfo')
SLACK = 0.0 if not CPUINFO.exists() or 'vnni' in CPUINFO.read_text() else 0.15
LEARN = dict(
    classifier=(80, 2e-3, 0.99),
    retinanet=(150, 4e-3, 0.95),
    mask_rcnn=(250, 4e-3, 0.85),
    upernet=(300, 3e-3, 0.95),
    dino=(200, 2e-3, 0.85),
)
ATTEMPTS = int8.ATTEMPTS
WINDOWS = {'model.backbone.window_size': 4, 'model.backbone.pad_small_map': True}
CASES = [
    pytest.param(task, marks=[] if task in ('classifier', 'retinanet') else pytest.mark.slow)
    for task in LEARN
]


@pytest.fixture(scope='session')
def learned(tmp_path_factory):
    """Return config, checkpoint and deploy form of a model that finds rectangles, made once."""
    folder = tmp_path_factory.mktemp('learned')

    @cache
    def get(task):
        torch.manual_seed(0)
        if task == 'dino':
            model = spread(random_model(detr_config('DINO')))
            train(model, task, *LEARN[task][:2])
            return None, None, model
        config = write_config(task, folder)
        cfg = load_config(config, WINDOWS)
        if task == 'classifier':  # without Mixup, for seven classes
            cfg.model.train_cfg, cfg.model.head.loss = None, dict(type='CrossEntropyLoss')
        if task == 'retinanet':  # NNCF takes a second for each layer of each level
            cfg.model.bbox_head.stacked_convs = 1
        cfg.dump(config)
        model = random_model(cfg)
        train(model, task, *LEARN[task][:2])
        checkpoint = str(folder / f'{task}.pth')
        torch.save(dict(state_dict=model.state_dict()), checkpoint)
        return config, checkpoint, open_model(cfg, checkpoint, merge=True)

    return get


def scenes(task, seed=1, number=12):
    rng = np.random.default_rng(seed)
    return [batch(rng, task) for _ in range(number)]


def rescale(model, factor):
    """Let two of eight channels of values be larger, and undo it behind: the same function."""
    for module in model.modules():
        if hasattr(module, 'qkv') and hasattr(module, 'proj'):
            channels = module.proj.weight.shape[1]
            scale = torch.ones(channels)
            scale[::8] = factor
            with torch.no_grad():
                module.qkv.weight[2 * channels :] *= scale[:, None]
                module.qkv.bias[2 * channels :] *= scale
                module.proj.weight /= scale
    return model


@pytest.mark.parametrize('task', CASES)
def test_the_file_finds_what_the_model_finds(task, learned, tmp_path, monkeypatch):
    if task == 'retinanet':  # whose head is there once for each level
        without_bias_correction(monkeypatch)
    model, seen, others = learned(task)[2], scenes(task), scenes(task, 2)
    file = str(tmp_path / 'model.xml')
    tolerance = LEARN[task][2] - SLACK
    done = int8.quantize(copy.deepcopy(model), file, seen, others, tolerance)
    assert {p.name for p in tmp_path.iterdir()} == {'model.xml', 'model.bin'}
    assert done['agreement'] >= tolerance
    # What is said is true of the file, on images that nothing has seen, too.
    exported = ExportedModel(file, model.data_preprocessor, 'f32')
    assert agreement(model, exported, others) == pytest.approx(done['agreement'], abs=1e-6)
    assert agreement(model, exported, scenes(task, 3)) >= tolerance - 0.05
    assert done['layers'] == int8.layers_in_int8(file) and len(done['layers']) > 15
    if task != 'dino':  # whose attention takes the queries, which are constants, for weights
        assert all(done['layers'].values())
    # bf16 is what OpenVINO computes in on processors that have it.
    rounded = ExportedModel(file, model.data_preprocessor, 'bf16')
    assert agreement(model, rounded, others) >= tolerance - 0.05


def test_outlier_channels(learned, tmp_path, monkeypatch):
    """SmoothQuant protects them; without it the file is refused."""
    without_bias_correction(monkeypatch)
    model, seen, others = learned('classifier')[2], scenes('classifier'), scenes('classifier', 2)
    scaled, file = rescale(copy.deepcopy(model), 300), str(tmp_path / 'model.xml')
    assert int8.quantize(scaled, file, seen, others, 0.93)['agreement'] >= 0.93
    before = (tmp_path / 'model.bin').read_bytes()
    monkeypatch.setattr(int8, 'ATTEMPTS', [(dict(matmul=-1, convolution=-1), [])])
    with pytest.raises(ValueError, match='in int8 .* less than 0.93: nothing is written'):
        int8.quantize(scaled, file, seen, others, 0.93)
    assert (tmp_path / 'model.bin').read_bytes() == before
    # If no attempt is acceptable, the first one that will do is written.
    monkeypatch.setattr(int8, 'ATTEMPTS', [*int8.ATTEMPTS, *ATTEMPTS])
    done = int8.quantize(scaled, file, seen, others, 1.1, least=0.93)
    assert done['agreement'] >= 0.93 and not done['backbone_only']


def test_outliers_of_convolutions(tmp_path, monkeypatch):
    """The second attempt protects them, and so does the third, which leaves the head in float.

    OpenVINO may fix the file to several images.
    """
    import openvino

    without_bias_correction(monkeypatch)
    backbone = dict(type='ResNet', depth=18, base_channels=8, stem_channels=8, out_indices=(3,))
    cfg = dict(
        type='mmpretrain.ImageClassifier',
        backbone=backbone,
        neck=dict(type='GlobalAveragePooling'),
        head=dict(type='LinearClsHead', num_classes=3, in_channels=64),
        data_preprocessor=dict(mean=[120] * 3, std=[58] * 3, num_classes=3),
    )
    torch.manual_seed(0)
    model = MODELS.build(cfg)
    train(model, 'classifier', 80, 2e-3)
    for layer in (model.backbone.layer1, model.backbone.layer2):
        with torch.no_grad():  # the same function
            layer[0].bn1.weight[:2] *= 3000
            layer[0].bn1.bias[:2] *= 3000
            layer[0].conv2.weight[:, :2] /= 3000
    model.dataset_meta = {}
    file, others = str(tmp_path / 'model.xml'), scenes('classifier', 2)
    done = int8.quantize(model, file, scenes('classifier'), others, 0.85)
    assert done['agreement'] >= 0.85
    fixed = openvino.Core().read_model(file)
    fixed.reshape([3, 3, 64, 64])
    exported = ExportedModel(fixed, model.data_preprocessor, 'f32')
    data = batch(np.random.default_rng(3), 'classifier', 3)
    assert agreement(model, exported, [data]) >= 0.85
    monkeypatch.setattr(int8, 'ATTEMPTS', [ATTEMPTS[0], ATTEMPTS[2]])
    done = int8.quantize(model, file, scenes('classifier'), others, 0.85)
    assert done['backbone_only']
    assert done['layers'] == {n: '/backbone/' in n for n in done['layers']}


def test_the_tool(learned, tmp_path, run_tool, capsys, monkeypatch):
    import cv2

    without_bias_correction(monkeypatch)
    config, checkpoint, model = learned('classifier')
    photos = tmp_path / 'photos'
    photos.mkdir()
    for i, data in enumerate(scenes('classifier', number=9)):
        image = data['inputs'][0].permute(1, 2, 0).numpy()
        cv2.imwrite(str(photos / f'{i}.png'), cv2.resize(image, (256, 256)))
    out = tmp_path / 'model.xml'
    run_tool('quantize', config, checkpoint, out, '--images', photos, '--num-images', 6)
    said, number = capsys.readouterr().out, len(int8.layers_in_int8(str(out)))
    assert f'{number} of {number} layers are in int8' in said
    assert 'on 3 images that it was not calibrated on' in said
    with pytest.raises(SystemExit, match="name an .xml instead of 'model.onnx'"):
        run_tool('quantize', config, checkpoint, 'model.onnx', '--images', photos)
    with pytest.raises(SystemExit, match='needs two images'):
        for path in list(photos.iterdir())[1:]:
            path.unlink()
        run_tool('quantize', config, checkpoint, out, '--images', photos)
