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
