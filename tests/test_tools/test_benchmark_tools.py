"""The command lines of what measures."""

import pytest
import torch

import repa_mm
from repa_mm.apis import open_model
from repa_mm.export import Session
from repa_mm.faster import rewrite_
from repa_mm.io.configs import load_config
from tests.conftest import random_model
from tests.test_export.conftest import write_config

REPA, VANILLA = (
    repa_mm.config_path(f'demo/retinanet_{name}_digits.py') for name in ('repa_swin', 'swin')
)
RETINANET = 'mmdet::retinanet/retinanet_r50_fpn_1x_coco.py'
GRAY = """
_base_ = {!r}
model = dict(
    data_preprocessor=dict(mean=[116.0], std=[57.0], bgr_to_rgb=False), backbone=dict(in_channels=1)
)
"""
WHOLE = """
_base_ = {!r}
model = dict(_delete_=True, type='Restructured', model={{{{_base_.model}}}}, structures=[])
"""
RESNET = RETINANET, '--input-shape', 64, 96, '--repeats', 1
BOTH = REPA, '--baseline', VANILLA, '--input-shape', 64, 96, '--repeats', 2


@pytest.mark.parametrize(
    'tool, arguments, expected',
    [
        ('benchmark', BOTH, ['against stock', '| stock with our parts |', '| deploy form ']),
        ('benchmark', (*RESNET, '--part', 'backbone'), ['| model ']),
        (
            'benchmark',
            (*BOTH, '--part', 'backbone', '--amp', 'bfloat16'),
            ['backbone, 1x3x64x96, bfloat16', 'against our parts', '| deploy form '],
        ),
        ('get_flops', (REPA, '--input-shape', 64, 64), ['GMACs', '| training', '| deploy']),
        ('get_flops', (VANILLA, '--part', 'backbone'), ['GMACs', '| as it is']),
    ],
)
def test_tool(tool, arguments, expected, call, capsys):
    assert call(tool, *arguments) == (0, '')
    out = capsys.readouterr().out
    assert all(text in out for text in expected)
    assert tool == 'get_flops' or 'Threads: ' in out


@pytest.mark.parametrize(
    'tool, arguments, named',
    [
        ('benchmark', (VANILLA, '--images', 'folder'), '--dataset'),
        ('benchmark', (VANILLA, '--baseline-checkpoint', 'a.pth'), '--baseline: give both'),
        ('benchmark', (VANILLA, '--part', 'backbone', '--exported', 'a.onnx'), '--part backbone'),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(tool, arguments, named, call, capsys):
    assert call(tool, *arguments)[0] == 2
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_parts_of_ours_that_compute_something_else_are_refused(call, monkeypatch):
    def broken(model, *stages):
        torch.nn.init.ones_(next(model.backbone.parameters()))
        return rewrite_(model, *stages)

    monkeypatch.setattr('repa_mm.measure.variants.rewrite_', broken)
    status, error = call('benchmark', *BOTH)
    assert status and 'stock with our parts' in error


@pytest.mark.parametrize(
    'base, text, channels',
    [
        (REPA, GRAY, 1),
        (REPA.replace('retinanet', 'upernet'), WHOLE, 3),
        (repa_mm.config_path('repa_deit_t_in1k.py'), WHOLE, 3),
    ],
    ids=['gray', 'segmentor', 'classifier'],
)
def test_models_of_other_channels_and_whole_models(base, text, channels, tmp_path, call, capsys):
    """The number of channels and of classes is that of the model."""
    (tmp_path / 'config.py').write_text(text.format(base))
    small = tmp_path / 'config.py', '--input-shape', 224, 224
    benchmark = 'benchmark', *small, '--repeats', 1
    for command in (benchmark, (*benchmark, '--part', 'backbone'), ('get_flops', *small)):
        assert call(*command) == (0, '')
        out = capsys.readouterr().out
        assert f'1x{channels}x224x224' in out or 'GMACs' in out
    assert '| deploy' in out


def test_a_file_of_a_segmentor_slides_as_the_model_does(tmp_path, call, capsys, monkeypatch):
    """On noise, too: two windows of 96 in each direction."""
    config, out = write_config('slide', tmp_path), tmp_path / 'model.onnx'
    torch.save(open_model(config).state_dict(), tmp_path / 'model.pth')
    assert (
        call('export', config, tmp_path / 'model.pth', out, '--unchecked', '--no-dynamic')[0] == 0
    )
    shapes, run = [], Session.__call__
    monkeypatch.setattr(
        Session, '__call__', lambda self, x, **kw: shapes.append(x.shape) or run(self, x, **kw)
    )
    small = '--input-shape', 160, 160, '--repeats', 1
    assert call('benchmark', config, '--exported', out, *small) == (0, '')
    assert '| model.onnx' in capsys.readouterr().out.replace(str(tmp_path) + '/', '')
    assert len(shapes) % 4 == 0 and {*shapes} == {(1, 3, 96, 96)}


def test_images_of_a_data_set(in_digits, call, capsys, monkeypatch):
    config, checkpoint = write_config('retinanet', in_digits), str(in_digits / 'model.pth')
    torch.save(open_model(config).state_dict(), checkpoint)
    opened = []

    def exported(file, preprocessor, precision):
        opened.append((file, precision, preprocessor.mean.flatten().tolist()))
        return open_model(config)

    monkeypatch.setattr('repa_mm.export.ExportedModel', exported)
    arguments = 'benchmark', config, checkpoint, '--dataset'
    for options in (('--part', 'backbone'), ('--images', 'not there')):
        assert call(*arguments, *options)[0]
    capsys.readouterr()
    vanilla = write_config('retinanet', in_digits, repa=False)
    with open(vanilla, 'a') as file:
        file.write("model['data_preprocessor'] = dict(mean=[1.0, 2.0, 3.0])\n")
    found = random_model(load_config(vanilla))  # an object at every anchor
    torch.save(found.state_dict(), in_digits / 'vanilla.pth')
    baseline = '--baseline', vanilla, '--baseline-checkpoint', in_digits / 'vanilla.pth'
    assert call(*arguments, 3, *baseline, '--exported', 'a.onnx', 'b.xml:f32') == (0, '')
    mean = pytest.approx(load_config(config).model.data_preprocessor.mean)  # not the baseline's
    assert opened == [('a.onnx', None, mean), ('b.xml', 'f32', mean)]
    out = capsys.readouterr().out
    assert '3 images of the test data, float32, medians of 3 turns' in out
    rows = [line.split('|')[1:] for line in out.splitlines() if line.startswith('| ')]
    assert [row[0].strip() for row in rows] == [
        *('model', 'stock', 'stock with our parts', 'deploy form', 'a.onnx', 'b.xml:f32')
    ]
    for _, median, quartiles, per_second, *_ in rows[1:]:
        low, high = map(float, quartiles.split(' to '))
        assert 0 < low <= float(median) <= high and float(per_second) > 0
    objects = [row[-2].strip() for row in rows[1:]]
    assert min(map(float, objects[:2])) > 5 and objects[2:] == ['next to none'] * 3
    assert 'skips suppression and masks: give checkpoints' in out
    assert call(*arguments, '--images', 'data/demo/coco/val2017') == (0, '')
    assert '4 images of data/demo/coco/val2017' in capsys.readouterr().out  # there are no more
