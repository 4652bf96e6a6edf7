"""The command lines of benchmarks/, on small images."""

import importlib
import sys

import pytest

import repa_mm

REPA, VANILLA = (
    repa_mm.config_path(f'demo/retinanet_{name}_digits.py') for name in ('repa_swin', 'swin')
)
SMALL = '--input-shape', 64, 96, '--repeats', 1
BOTH = REPA, '--baseline', VANILLA, *SMALL


@pytest.mark.parametrize(
    'name, arguments, expected',
    [
        ('training', BOTH, ['| stock ', '| literal ', '| auto ']),
        ('paper', (REPA, *SMALL), ['by the merge', 'digits']),
    ],
)
def test_command(name, arguments, expected, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', [name, *map(str, arguments)])
    importlib.import_module(f'benchmarks.{name}').main()
    out = capsys.readouterr().out
    assert all(text in out for text in expected)
