"""Quantized models, and what 8 bits cost in each layer."""

import numpy as np
import pytest
import torch
import torch.nn as nn

import repa_mm
from repa_mm.export.int8 import (
    costliest,
    products_of,
    round_activations,
    round_weights,
    sensitivities,
)
from repa_mm.export.session import Session
from repa_mm.reparam import ChannelIdleFFN, set_shortcut


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
        merged = set_shortcut(repa_mm.reparameterize(ffn), shortcut)
        found = sensitivities(merged, outputs, [torch.randn(1, 64, 32)])
        assert set(found) == {'fc1', 'addmm'}
        errors.append(found['fc1'])
    assert errors[0] > 3 * errors[1]


def test_attention_of_a_detr_is_a_layer():
    torch.manual_seed(0)
    model = nn.ModuleDict(dict(attn=nn.MultiheadAttention(16, 2, batch_first=True)))

    def attention(model, x):
        return [model['attn'](x, x + 1, x)[0]]

    x = torch.randn(2, 9, 16)
    found = sensitivities(model, attention, [x])
    assert 1e-6 < found['attn'] < 1e-3
    with torch.no_grad():
        for weight in (model['attn'].in_proj_weight, model['attn'].out_proj.weight):
            weight.copy_(round_weights(weight))
    grid = round_activations(x)
    assert sensitivities(model, attention, [grid])['attn'] < found['attn'] / 2


def test_operands_with_names():
    class Named(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(input=x, weight=self.weight, bias=self.bias)

    torch.manual_seed(0)
    model = nn.Sequential(Named(8, 8))
    plain = nn.Sequential(nn.Linear(8, 8))
    plain.load_state_dict(model.state_dict())
    x = torch.randn(20, 8)
    assert sensitivities(model, outputs, [x]) == sensitivities(plain, outputs, [x])


@pytest.mark.parametrize('shape, axis', [((2, 30, 5), 2), ((2, 5, 6, 5), 1)])
def test_means_of_channels_do_not_count(shape, axis):
    """Of tokens, the channels are last."""
    torch.manual_seed(0)
    model = nn.Linear(shape[-1], shape[-1])
    size = [1] * len(shape)
    size[axis] = 5
    means = 100 * torch.randn(size)
    x = torch.randn(shape)
    model = nn.Sequential(model)
    (error,) = sensitivities(model, outputs, [x]).values()
    (same,) = sensitivities(model, lambda m, x: [m(x) + means], [x]).values()
    assert same == pytest.approx(error, rel=1e-2)


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


@pytest.fixture(scope='session')
def photos(tmp_path_factory):
    """A folder of four small images."""
    import cv2

    folder = tmp_path_factory.mktemp('photos')
    generator = np.random.default_rng(0)
    for i in range(4):
        coarse = generator.integers(0, 256, (8, 10, 3), np.uint8)
        cv2.imwrite(str(folder / f'{i}.png'), cv2.resize(coarse, (160, 128)))
    return folder


@pytest.mark.parametrize(
    'task',
    ['retinanet', *(pytest.param(t, marks=pytest.mark.slow) for t in ('upernet', 'mask_rcnn'))],
)
def test_quantized_models(task, exported, photos, tmp_path, run_tool, capsys):
    pytest.importorskip('openvino')
    pytest.importorskip('nncf')
    config, checkpoint, _, file = exported(task)
    run_tool('quantize.py', config, checkpoint, tmp_path / 'model.xml', '--images', photos)
    assert 'layers stay in float' in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ['model.bin', 'model.xml']
    quantized, expected = Session(str(tmp_path / 'model.xml')), Session(file)
    assert quantized.metadata == {**expected.metadata, 'precision': 'int8'}
    for height, width in ((128, 160), (160, 96)):
        image = np.random.default_rng(0).normal(size=(1, 3, height, width)).astype('f')
        actual = quantized(image)
        for name, value in expected(image).items():
            assert actual[name].dtype.kind == value.dtype.kind
            assert actual[name].shape == value.shape
    assert (tmp_path / 'model.bin').stat().st_size < len(open(file, 'rb').read())


@pytest.mark.slow
def test_quantized_for_one_shape(exported, photos, tmp_path):
    """Whatever the size of the images to calibrate on."""
    pytest.importorskip('openvino')
    pytest.importorskip('nncf')
    from repa_mm.export.int8 import quantize_checkpoint

    config, checkpoint, *_ = exported('retinanet')
    out = str(tmp_path / 'model.xml')
    quantize_checkpoint(
        config, checkpoint, out, images=str(photos), max_error=1, shape=(96, 160), batch=2
    )
    found = Session(out)(np.zeros((2, 3, 96, 160), np.float32))
    assert set(found) == {'boxes', 'scores', 'labels'}
    assert found['boxes'].shape[::2] == (2, 4) and found['labels'].dtype.kind == 'i'
