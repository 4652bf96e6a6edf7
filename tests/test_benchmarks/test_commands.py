"""The command lines of benchmarks/, on small images."""

import importlib
import sys

import pytest

import repa_mm

pytest.importorskip('mmdet')
REPA, VANILLA = (
    repa_mm.config_path(f'demo/retinanet_{name}_digits.py') for name in ('repa_swin', 'swin')
)
SMALL = '--input-shape', 64, 96, '--repeats', 1
BOTH = REPA, '--baseline', VANILLA, *SMALL


@pytest.mark.parametrize(
    'name, arguments, expected',
    [
        ('shares', BOTH, ['| deploy form, backbone ', '| deploy form, head ']),
        ('shares', (*BOTH, '--part', 'backbone'), ['| stock with our parts, FFNs ', '%']),
        ('training', BOTH, ['| stock ', '| literal ', '| auto ']),
        ('paper', (REPA, '--idle-ratios', 0.5, *SMALL), ['by the merge', ' 0.5 |', 'digits']),
    ],
)
def test_command(name, arguments, expected, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', [name, *map(str, arguments)])
    importlib.import_module(f'benchmarks.{name}').main()
    out = capsys.readouterr().out
    assert all(text in out for text in expected)
