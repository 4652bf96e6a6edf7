"""The command lines of what measures."""

import json
import runpy
import sys
from pathlib import Path

import pytest

import repa_mm
from repa_mm.benchmark import training

pytest.importorskip('mmdet')
REPA, VANILLA = (
    repa_mm.config_path(f'demo/retinanet_{name}_digits.py') for name in ('repa_swin', 'swin')
)
RETINANET = 'mmdet::retinanet/retinanet_r50_fpn_1x_coco.py'
PAPER = '--paper', REPA, '--input-shape', 64, 96, '--repeats', 1
RESNET = RETINANET, '--input-shape', 64, 96, '--repeats', 1
BOTH = REPA, '--baseline', VANILLA, '--input-shape', 64, 96, '--repeats', 2


@pytest.mark.parametrize(
    'tool, arguments, expected',
    [
        ('benchmark', BOTH, ['against stock', '| vanilla, our attention |', '| deploy ']),
        ('benchmark', (*BOTH, '--part', 'backbone'), ['by the merge', 'backbone, 1x3x64x96']),
        ('benchmark', (*BOTH, '--shares', '--part', 'backbone'), ['| deploy, FFNs ', '%']),
        ('benchmark', (*BOTH, '--shares'), ['| deploy, backbone ', '| deploy, head ']),
        ('benchmark', (*RESNET, '--part', 'backbone'), ['| deploy ']),
        ('benchmark', (*BOTH, '--train'), ['| literal ', '| auto ', 'peak memory']),
        ('benchmark', (*BOTH, '--train', '--part', 'backbone'), ['| literal ', '| auto ']),
        ('benchmark', ('--part', 'ffn', '--repeats', 1), ['folded', '64, 16 ', '32, 16 (DETR)']),
        ('benchmark', (*PAPER, '--idle-ratios', 0.5), ['by the merge', ' 0.5 |', 'digits']),
        ('get_flops', (REPA, '--input-shape', 64, 64), ['GMACs', '| training', '| deploy']),
        ('get_flops', (VANILLA, '--part', 'backbone'), ['GMACs', '| as it is']),
    ],
)
def test_tool(tool, arguments, expected, monkeypatch, capsys):
    monkeypatch.setattr(training, 'FFN_SHAPES', [(64, 16)])
    monkeypatch.setattr(training, 'ENCODER_SHAPE', (32, 16))
    path = str(Path(__file__).parents[2] / 'tools' / f'{tool}.py')
    monkeypatch.setattr(sys, 'argv', [path, *map(str, arguments)])
    runpy.run_path(path, run_name='__main__')
    out = capsys.readouterr().out
    assert all(text in out for text in expected)
    assert tool == 'get_flops' or 'Threads: ' in out


def test_of_several_runs_of_a_seed_the_last_counts(run_tool, tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / 'tools/dev'))
    found = [('original', 1, 0, 50), ('original', 1, 1, 60)]
    found += [('ours', 0.5, 0, 10), ('ours', 0.5, 0, 49), ('ours', 0.5, 1, 56)]
    found += [('CORP', 0.5, 0, 45)]
    lines = (dict(zip(('method', 'keep', 'seed', 'mIoU'), row), data='scenes') for row in found)
    (tmp_path / 'found.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    picture = tmp_path / 'found.png'
    run_tool('dev/compare', 'draw', tmp_path / 'found.jsonl', '--out', picture)
    out = capsys.readouterr().out
    assert picture.stat().st_size and '-2.500 ± 2.121' in out and '-5.000 |' in out
