"""Files in 8 bits and in bf16 find what the model finds, or are not written."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.registry import MODELS
from mmengine.structures import BaseDataElement, InstanceData, PixelData

from repa_mm.apis import open_model
from repa_mm.export import ExportedModel, agreement, int8
from repa_mm.io.configs import load_config
from tests.conftest import random_model
from tests.test_export.conftest import without_bias_correction, write_config
from tests.test_export.rectangles import batch, train

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
    folder, made = tmp_path_factory.mktemp('learned'), {}

    def get(task):
        if task not in made:
            torch.manual_seed(0)
            if task == 'dino':
                from tests.test_export.test_transformers import detector

                model, cfg = detector(task, lambda model: model)
                train(model, task, *LEARN[task][:2])
                made[task] = None, None, model
                return made[task]
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
            made[task] = config, checkpoint, open_model(cfg, checkpoint, merge=True)
        return made[task]

    return get


@pytest.fixture(scope='session')
def floats():
    """What models are in ONNX, by their weights."""
    return {}


@pytest.fixture(autouse=True)
def _exported_once(floats, monkeypatch):
    export = int8.agreeing_onnx

    def once(model, images):
        key = tuple(float(p.detach().double().abs().sum()) for p in model.parameters())
        if key not in floats:
            floats[key] = export(model, images)
        return floats[key]

    monkeypatch.setattr(int8, 'agreeing_onnx', once)


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
    assert done['images'] == len(others) and done['agreement'] >= tolerance
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
    monkeypatch.setattr(int8, 'ATTEMPTS', [(dict(matmul=-1, convolution=-1), False)])
    with pytest.raises(ValueError, match='in int8 .* less than 0.93: nothing is written'):
        int8.quantize(scaled, file, seen, others, 0.93)
    assert (tmp_path / 'model.bin').read_bytes() == before


def test_outliers_of_convolutions(tmp_path, monkeypatch):
    """The second attempt protects them, and so does the third, which leaves the head in float.

    The file may be fixed to several images.
    """
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
    kwargs = dict(tolerance=0.85, shape=(64, 64), batch=3)
    done = int8.quantize(model, file, scenes('classifier'), others, **kwargs)
    assert done['agreement'] >= 0.85 and done['images'] == 12
    exported = ExportedModel(file, model.data_preprocessor, 'f32')
    data = batch(np.random.default_rng(3), 'classifier', 3)
    assert agreement(model, exported, [data]) >= 0.85
    monkeypatch.setattr(int8, 'ATTEMPTS', [ATTEMPTS[0], ATTEMPTS[2]])
    done = int8.quantize(model, file, scenes('classifier'), others, **kwargs)
    assert done['in_float'] == ['head']
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
    run_tool('quantize.py', config, checkpoint, out, '--images', photos, '--num-images', 6)
    said, number = capsys.readouterr().out, len(int8.layers_in_int8(str(out)))
    assert f'{number} of {number} layers are in int8' in said
    assert 'on 3 images that it was not calibrated on' in said
    with pytest.raises(SystemExit, match='needs two images'):
        for path in list(photos.iterdir())[1:]:
            path.unlink()
        run_tool('quantize.py', config, checkpoint, out, '--images', photos)


def test_a_fixed_shape_has_the_channels_of_the_model(plain, tmp_path, monkeypatch):
    gray = dict(mean=[116.0], std=[57.0], to_rgb=False)
    model = plain('classifier', **{'backbone.in_channels': 1, 'data_preprocessor': gray})
    monkeypatch.setattr(int8, 'agreement', lambda *_, **__: 1.0)
    without_bias_correction(monkeypatch)
    seen = [dict(x, inputs=[x['inputs'][0][:1]]) for x in scenes('classifier', number=2)]
    file = str(tmp_path / 'model.xml')
    int8.quantize(model, file, seen, seen, shape=(64, 96))
    found = ExportedModel(file, model.data_preprocessor).session(np.zeros((1, 1, 64, 96), 'f4'))
    assert found['scores'].shape == (1, 7)
    with pytest.raises(ValueError, match="name an .xml instead of 'model.onnx'"):
        int8.quantize(model, 'model.onnx', seen, seen)


class Maps(torch.nn.Module):
    """Gives the same answer to every image."""

    def __init__(self, **sample):
        super().__init__()
        self.sample = BaseDataElement(**sample)

    def test_step(self, data):
        return [self.sample]


class Answers(Maps):
    def __init__(self, boxes, labels, scores):
        found = InstanceData(bboxes=torch.tensor(boxes, dtype=torch.float32).view(-1, 4))
        found.labels, found.scores = torch.tensor(labels).long(), torch.tensor(scores).float()
        super().__init__(pred_instances=found)
        self.found = found


BOX, FAR, NEAR = [0, 0, 10, 10], [50, 50, 60, 60], [0, 0, 10, 9]


@pytest.mark.parametrize(
    'boxes, labels, scores, expected',
    [
        ([BOX, FAR], [1, 2], [0.9, 0.4], 1),
        ([FAR, BOX], [2, 1], [0.4, 0.9], 1),  # whatever the order
        ([NEAR, FAR], [1, 2], [0.9, 0.4], 1),
        ([BOX, FAR], [2, 1], [0.9, 0.4], 0),
        ([BOX], [1], [0.9], 2 * 0.81 / (2 * 0.81 + 0.16)),
        ([BOX, BOX, FAR], [1, 1, 2], [0.9, 0.9, 0.4], 2 * 0.97 / (2 * 0.97 + 0.81)),
        ([], [], [], 0),
        ([BOX, FAR], [1, 2], [0.9, np.nan], np.nan),
    ],
)
def test_agreement_of_objects(boxes, labels, scores, expected):
    model = Answers([BOX, FAR], [1, 2], [0.9, 0.4])
    batches = [None] * 3
    found = agreement(model, Answers(boxes, labels, scores), batches)
    assert found == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    'changes, expected',
    [
        (dict(), 1),
        (dict(bboxes=[BOX, [50, 50, 60, 60.05]], scores=[0.9, 0.4005]), 1),
        (dict(bboxes=[BOX, [50, 50, 60, 61]]), 0.5),
        (dict(scores=[0.9, 0.5]), 0.5),
        (dict(scores=[np.nan, 0.4]), 0.5),
        (dict(labels=[1, 3]), 0.5),
        (dict(masks=5), 0.5),
        (dict(bboxes=[BOX], labels=[1], scores=[0.9], masks=0), 2 / 3),
        (dict(bboxes=[], labels=[], scores=[], masks=0), 0),
    ],
)
def test_strict_agreement_is_the_share_of_objects_with_a_counterpart(changes, expected):
    def answers(bboxes=(BOX, FAR), labels=(1, 2), scores=(0.9, 0.4), masks=0):
        found = Answers(list(bboxes), list(labels), list(scores))
        inside = torch.arange(800).reshape(2, 20, 20) % 3 == 0
        inside[1, :masks] = False
        found.found.masks = inside[: len(bboxes)]
        return found

    found = agreement(answers(), answers(**changes), [None], strict=True)
    assert found == pytest.approx(expected)


def test_strict_agreement_of_pixels_and_scores():
    labels = torch.zeros(1, 10, 10, dtype=torch.long)
    other = labels.clone()
    other[0, 0, :3] = 1
    for key, name in (('pred_sem_seg', 'data'), ('pred_panoptic_seg', 'sem_seg')):
        a, b = (Maps(**{key: PixelData(**{name: x})}) for x in (labels, other))
        assert agreement(a, b, [None] * 2, strict=True) == pytest.approx(0.97)
    a, b, none = (
        Maps(pred_score=torch.tensor([0.6 + x, 0.4 - x]), pred_label=torch.tensor([0]))
        for x in (0, 0.01, np.nan)
    )
    assert agreement(a, b, [None] * 2, strict=True) == pytest.approx(0.99)
    assert all(np.isnan(agreement(a, none, [None], strict)) for strict in (False, True))


def test_agreement_of_several_labels():
    """The Dice coefficient of the sets; 1 where neither has a label."""
    scores = torch.tensor([0.9, 0.8, 0.2])
    both, one, none = (
        Maps(pred_score=scores, pred_label=torch.tensor(x).long()) for x in ([0, 1], [1], [])
    )
    for a, b, expected in ((both, both, 1), (both, one, 2 / 3), (none, none, 1), (one, none, 0)):
        assert agreement(a, b, [None] * 3) == pytest.approx(expected)


def test_the_least_agreement_counts():
    """Of small classes, too; of labels beside scores, and of boxes beside masks."""
    labels = torch.zeros(1, 100, 100, dtype=torch.long)
    labels[:, :20, :20] = 3
    maps = [Maps(pred_sem_seg=PixelData(data=x)) for x in (labels, torch.zeros_like(labels))]
    classes = [
        Maps(pred_score=torch.tensor(scores), pred_label=torch.tensor([label]))
        for scores, label in (([0.55, 0.45], 0), ([0.45, 0.55], 1))
    ]
    objects = [Answers(boxes, [1, 2], [0.9, 0.9]) for boxes in ([BOX, FAR], [FAR, BOX])]
    for answers in objects:
        answers.found.masks = torch.ones(2, 8, 8, dtype=torch.bool)
    for (model, other), largest in ((maps, 0.5), (classes, 0), (objects, 0)):
        assert agreement(model, model, [None] * 5) == pytest.approx(1)
        assert agreement(model, other, [None] * 5) <= largest


def test_agreement_of_panoptic_maps_is_that_of_segments():
    segments = torch.full((1, 20, 20), 5)  # nothing, as a segment
    segments[:, :8], segments[:, 8:12, :9] = 1001, 3
    fewer, other, nothing = segments.clone(), segments.clone(), torch.full((1, 20, 20), 5)
    fewer[segments == 3], other[segments == 1001] = 5, 2001  # the number of an object is free
    model, fewer, other, nothing = (
        Maps(pred_panoptic_seg=PixelData(sem_seg=x)) for x in (segments, fewer, other, nothing)
    )
    assert agreement(model, other, [None]) == 1
    assert agreement(model, fewer, [None]) == pytest.approx(4 / 5)
    assert agreement(model, nothing, [None]) == 0
    with pytest.raises(ValueError, match='finds next to nothing'):
        agreement(nothing, nothing, [None])


def test_nothing_to_find_is_no_agreement():
    nothing = Answers([], [], [])
    for strict in (False, True):
        with pytest.raises(ValueError, match='finds next to nothing in the 2 images'):
            agreement(nothing, nothing, [None] * 2, strict)
