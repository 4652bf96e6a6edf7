"""The command lines of what measures."""

import runpy
import sys
from pathlib import Path

import pytest

import repa_mm

pytest.importorskip('mmdet')
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
        ('benchmark', (*BOTH, '--part', 'backbone'), ['against our parts', 'backbone, 1x3x64x96']),
        ('benchmark', (*RESNET, '--part', 'backbone'), ['| model ']),
        (
            'benchmark',
            (*BOTH, '--part', 'backbone', '--amp', 'bfloat16'),
            ['1x3x64x96, bfloat16', '| deploy form '],
        ),
        ('get_flops', (REPA, '--input-shape', 64, 64), ['GMACs', '| training', '| deploy']),
        ('get_flops', (VANILLA, '--part', 'backbone'), ['GMACs', '| as it is']),
    ],
)
def test_tool(tool, arguments, expected, monkeypatch, capsys):
    path = str(Path(__file__).parents[2] / 'tools' / f'{tool}.py')
    monkeypatch.setattr(sys, 'argv', [path, *map(str, arguments)])
    runpy.run_path(path, run_name='__main__')
    out = capsys.readouterr().out
    assert all(text in out for text in expected)
    assert tool == 'get_flops' or 'Threads: ' in out


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
