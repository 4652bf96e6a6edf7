"""The table and the picture of the report."""

import itertools
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from repa_mm.search import report
from repa_mm.search.formats import EAGER, F32, INT8
from repa_mm.search.rows import Row

ROWS = [
    Row(
        name, format=kind, speedup=40 / ms, speedup_interval=[39 / ms, 41 / ms], ms=ms, stock_ms=40,
        metric=metric, difference=metric and metric - 50.6, interval=metric and [-0.4, 0.3],
        chosen=ms == 18, mb=1.0, tested_in=kind,
    )
    for name, kind, ms, metric in [
        ('stock', EAGER, 40, 50.6), ('40 %', EAGER, 30, 50.4), ('40 %', INT8, 18, 50.3),
        ('40 %', F32, 20, 50.4), ('30 %', F32, 19.9, 50.4), ('25 %', F32, 19.8, 50.4),
        ('9 %', F32, 15, None),
    ]
]  # fmt: skip


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn."""
    found = []

    class Kept(Figure):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            found.append(self)

    monkeypatch.setattr(report, 'Figure', Kept)
    return found


def test_picture_has_every_row_and_each_name_once(figures):
    text = report.scatter(ROWS, 'coco/bbox_mAP', {'Others': [(0.5, 50.35), (0.51, 50.35)]})
    words = [
        node.text for node in ElementTree.fromstring(text).iter() if node.tag.endswith('}text')
    ]
    for once in '40 %', '30 %', '25 %', 'stock', 'chosen', '2.22 ×', EAGER, F32, INT8, 'box AP':
        assert words.count(once) == 1, once
    assert '9 %' not in words and 'OpenVINO bf16' not in words
    assert 'The same box AP, 2.2 × as fast' in words and any('← faster' in word for word in words)
    (axes,) = figures[0].axes
    low, high = axes.get_ylim()
    assert low <= 48.6 and high >= 52.6  # a difference of 0.3 looks as small as it is
    boxes = [x.get_window_extent() for x in axes.texts if x.get_text()]
    assert len(boxes) == 4 and not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_picture_without_tests():
    rows = [replace(row, metric=None, interval=None, difference=None) for row in ROWS]
    assert '>MB<' in report.scatter(rows, '')


@pytest.mark.parametrize(
    'interval, expected',
    [
        ([-0.4, 0.3], 'The same mIoU, 2.2 × as fast'),
        ([-3, 2.5], '-0.3 mIoU [-3.0, 2.5], 2.2 × as fast'),  # too few images to tell
        ([-0.6, -0.1], '-0.3 mIoU [-0.6, -0.1], 2.2 × as fast'),
        (None, '2.2 × as fast'),
    ],
)
def test_the_title_says_the_result(interval, expected):
    rows = [replace(row, interval=interval) for row in ROWS]
    assert report.headline(rows, 'mIoU') == expected
    assert report.headline([replace(row, chosen=False) for row in ROWS[:3]], 'mIoU') == (
        'The same mIoU, 2.2 × as fast'
    )


def test_the_table():
    head, lines = report.table(ROWS, 'coco/bbox_mAP')
    assert head[:4] == ['candidate', 'format', 'ms', '95th percentile'] and 'box AP' in head
    narrow = report.table([replace(row, tested_in=EAGER) for row in ROWS], 'mIoU', wide=False)[1]
    assert narrow[2] == [
        '→ 40 %', INT8, '18.0', '40.0', '2.22 [2.17, 2.28]', '≈ 50.30', '-0.30 [-0.40, 0.30]'
    ]  # fmt: skip
    assert narrow[-1][-2:] == lines[-1][-3:-1] == ['', '']
