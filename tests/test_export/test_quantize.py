"""Quantized models, and what 8 bits cost in each layer."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn

import repa_mm
from repa_mm.export.quantization import costliest
from repa_mm.export.quantize import products_of
from repa_mm.export.sensitivity import round_activations, round_weights, sensitivities
from repa_mm.reparam import ChannelIdleFFN

from .test_whole_models import exported  # noqa: F401, a fixture

ROOT = Path(__file__).parents[1]


def outputs(model, image):
    return [model(image)]


def test_rounding_has_256_values():
    x = torch.randn(500, 40, generator=torch.Generator().manual_seed(0)) + 1
    rounded = round_activations(x)
    step = (x.max() - x.min()) / 255
    assert len(rounded.unique()) <= 256 and (rounded - x).abs().max() <= step / 2 * 1.01
    rounded = round_weights(x, 1)
    assert max(len(column.unique()) for column in rounded.t()) <= 256
    assert ((rounded - x).abs().amax(0) <= x.abs().amax(0) / 127 / 2 * 1.01).all()


def test_layers_with_outliers_cost_most():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv2d(4, 4, 1), nn.Linear(8, 8))
    with torch.no_grad():
        model[1].weight[:, 0] *= 100  # takes the range of the other channels
        model[1].weight[:, 0, 0, 0] = 0
        model[2].weight[0, 0] = 1000
    found = sensitivities(model, outputs, [torch.randn(2, 4, 8, 8)])
    assert set(found) == {'0', '1', '2'}
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert all(0 < error < 1 for error in found.values())


def test_a_shortcut_inside_costs_more(randomize):
    """A 1 on the diagonal takes the range of a row."""
    ffn = randomize(ChannelIdleFFN(32, 128, idle_ratio=0.75)).eval()
    with torch.no_grad():
        ffn.fc2.weight *= 0.05
    errors = []
    for shortcut in ('inside', 'outside'):
        merged = repa_mm.reparameterize(ffn, shortcut=shortcut)
        found = sensitivities(merged, outputs, [torch.randn(1, 64, 32)])
        assert set(found) == {'fc1', 'addmm'}
        errors.append(found['fc1'])
    assert errors[0] > 3 * errors[1]


def test_as_few_layers_as_needed_stay_in_float():
    errors = dict(a=4e-3, b=1e-3, c=2e-3, d=5e-4)
    for max_error, kept in ((1, []), (4e-3, ['a']), (2e-3, ['a', 'c']), (0, ['a', 'c', 'b', 'd'])):
        assert costliest(errors, max_error) == kept


def test_products_of_layers_are_found():
    names = [
        '/backbone/stages.0/blocks.1/attn/qkv/MatMul',
        '/backbone/stages.0/blocks.1/attn/MatMul',
        '/backbone/stages.0/blocks.1/ffn/fc1/Gemm/WithoutBiases',
        '/backbone/stages.0/blocks.1/ffn/Gemm/WithoutBiases',
        '/backbone/stages.0/blocks.10/ffn/Gemm/WithoutBiases',
        '/backbone/downsample/reduction_2/MatMul',
        '/predict/bbox_head/retina_cls/Conv/WithoutBiases',
        '/predict/bbox_head/retina_cls_1/Conv',
    ]
    for layer, found in (
        ('backbone.stages.0.blocks.1.attn.qkv', names[:1]),
        ('backbone.stages.0.blocks.1.ffn.fc1', names[2:3]),
        ('backbone.stages.0.blocks.1.ffn.addmm', names[3:4]),
        ('backbone.stages.1.downsample.reduction', names[5:6]),
        ('bbox_head.retina_cls', names[6:]),
        ('neck.lateral_convs.0.conv', []),
    ):
        assert products_of(layer, names) == found


@pytest.fixture
def run_tool(monkeypatch):
    def run(tool, *args):
        monkeypatch.setattr(sys, 'argv', [tool, *map(str, args)])
        runpy.run_path(str(ROOT / 'tools' / tool), run_name='__main__')

    return run


@pytest.fixture(scope='session')
def photos(tmp_path_factory):
    """A folder of six small images."""
    import cv2

    folder = tmp_path_factory.mktemp('photos')
    generator = np.random.default_rng(0)
    for i in range(6):
        coarse = generator.integers(0, 256, (8, 10, 3), np.uint8)
        cv2.imwrite(str(folder / f'{i}.png'), cv2.resize(coarse, (160, 128)))
    return folder


@pytest.mark.parametrize(
    'task',
    ['retinanet', *(pytest.param(t, marks=pytest.mark.slow) for t in ('upernet', 'mask_rcnn'))],
)
def test_quantized_models(task, exported, photos, tmp_path, run_tool, capsys):  # noqa: F811
    pytest.importorskip('openvino')
    pytest.importorskip('nncf')
    from repa_mm.export.session import Session

    config, checkpoint, model, file = exported(task)
    out = tmp_path / 'model.xml'
    args = ('--images', photos, '--num-images', 4)
    run_tool('quantize.py', config, checkpoint, out, *args)
    printed = capsys.readouterr().out
    assert 'calibrated on 4 images' in printed and 'int8' in printed
    quantized, expected = Session(str(out)), Session(file)
    assert quantized.metadata['precision'] == 'int8'
    assert quantized.metadata['task'] == expected.metadata['task']
    for height, width in ((128, 160), (160, 96)):
        image = np.random.default_rng(0).normal(size=(1, 3, height, width)).astype('f')
        actual = quantized(image)
        for name, value in expected(image).items():
            assert actual[name].dtype.kind == value.dtype.kind
            assert actual[name].shape == value.shape
    assert (out.parent / 'model.bin').stat().st_size < Path(file).stat().st_size


def test_bad_requests(exported, photos, tmp_path, run_tool):  # noqa: F811
    config, checkpoint, _, file = exported('retinanet')
    empty = tmp_path / 'empty'
    empty.mkdir()
    out = tmp_path / 'model.xml'
    cases = [
        (file, out, (), 'is an exported or quantized model: quantization begins with a checkpoint'),
        (checkpoint, out, ('--num-images', 1), '1 image to calibrate on are too few'),
        (checkpoint, out, ('--max-error', -1), '--max-error must not be negative'),
    ]
    try:
        import nncf  # noqa: F401
    except ImportError:
        cases.append((checkpoint, out, (), 'quantization needs OpenVINO and NNCF'))
    else:
        one = tmp_path / 'one'
        one.mkdir()
        (one / '0.png').write_bytes((photos / '0.png').read_bytes())
        cases += [
            (checkpoint, out, ('--images', empty), 'no image to calibrate on'),
            (checkpoint, out, ('--images', one), '1 image to calibrate on are too few'),
            (checkpoint, tmp_path / 'model.onnx', ('--images', photos), 'are written as .xml'),
        ]
    for source, target, args, message in cases:
        with pytest.raises(SystemExit, match=f'error: .*{message}') as end:
            run_tool('quantize.py', config, source, target, *args)
        assert '\n' not in str(end.value)
    assert not out.exists() and not (tmp_path / 'model.bin').exists()


def test_quantized_files_are_no_checkpoints(exported, tmp_path, run_tool):  # noqa: F811
    config = exported('retinanet')[0]
    file = tmp_path / 'model.xml'
    file.write_text('<net/>')
    with pytest.raises(SystemExit, match='error: .*model.xml'):
        run_tool('test.py', config, file)


def test_quantized_for_one_shape(exported, photos, tmp_path, run_tool, monkeypatch):  # noqa: F811
    """Whatever the size of the images to calibrate on; all outputs come from one call."""
    openvino = pytest.importorskip('openvino')
    pytest.importorskip('nncf')
    from repa_mm.export.session import Session

    config, checkpoint, _, _ = exported('retinanet')
    out = tmp_path / 'model.xml'
    args = ('--images', photos, '--num-images', 4, '--max-error', 1)
    run_tool('quantize.py', config, checkpoint, out, *args, '--shape', 96, 160, '--batch', 2)
    quantized = Session(str(out))
    assert quantized.shape == [2, 3, 96, 160]
    calls, call = [], openvino.CompiledModel.__call__
    monkeypatch.setattr(
        openvino.CompiledModel, '__call__', lambda *args: calls.append(args) or call(*args)
    )
    found = quantized(np.zeros((2, 3, 96, 160), np.float32))
    assert set(found) == {'boxes', 'scores', 'labels'} and len(calls) == 1
    assert found['boxes'].shape[::2] == (2, 4) and found['labels'].dtype.kind == 'i'
    with pytest.raises(ValueError, match='was exported for images of shape'):
        quantized(np.zeros((1, 3, 96, 160), np.float32))
