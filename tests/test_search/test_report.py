"""The picture and the commands of the report."""

import shlex
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

import repa_mm
from repa_mm.search.formats import EAGER, F32, GRAPHS, INT8
from repa_mm.search.report import commands, scatter

ROOT = Path(repa_mm.config_path('retinanet_repa_swin_b.py')).parents[1]


def test_picture_has_every_row_and_each_name_once():
    rows = [
        dict(candidate=name, format=kind, ms=ms, metric=metric, chosen=ms == 18, mb=1.0)
        for name, kind, ms, metric in [
            ('stock', EAGER, 40, 50.6), ('40 %', EAGER, 30, 50.4), ('40 %', INT8, 18, 50.3),
            ('40 %', F32, 20, 50.4), ('30 %', F32, 19.9, 50.4), ('9 %', F32, 15, None),
        ]
    ]  # fmt: skip
    text = scatter(rows, 'coco/bbox_mAP')
    words = [
        node.text for node in ElementTree.fromstring(text).iter() if node.tag.endswith('}text')
    ]
    for once in '40 %', '30 %', 'stock', 'chosen', EAGER, F32, INT8, 'coco/bbox_mAP':
        assert words.count(once) == 1, once
    assert '9 %' not in words and 'OpenVINO bf16' not in words
    for row in rows:
        row['metric'] = None
    assert '>MB<' in scatter(rows, '')


@pytest.mark.parametrize(
    ('kind', 'file', 'expected'),
    [
        (F32, 'a.onnx', ['--exported', 'DIR/model.onnx:f32']),
        ('ONNX Runtime', 'a.onnx', ['--exported', 'DIR/model.onnx']),
        (GRAPHS, None, ['--amp', 'float16', '--cuda-graphs']),
        (EAGER, None, []),
    ],
)
def test_commands_run_the_chosen_format(kind, file, expected):
    """In a shell, for a folder with a space and an apostrophe."""
    folder = "it's mine"
    lines = commands(dict(format=kind, file=file), SimpleNamespace(config='set'), folder)
    lines = [shlex.split(line) for line in lines.splitlines()]
    time = ['tools/benchmark.py', 'DIR/tested.py', 'DIR/model.pth', '--dataset', *expected]
    assert lines[-1] == ['python', *(word.replace('DIR', folder) for word in time)]
    assert len(lines) == (3 if file else 2) and ('--precision' in lines[1]) == (kind == F32)
    for _, name, *args in lines:  # the tools accept them
        if not name.endswith('/test.py'):  # the codebase's own
            with patch('sys.argv', [name, *args]):
                run_path(str(ROOT / name))['parse_args']()
