"""The picture of the report."""

import xml.etree.ElementTree as ElementTree

from repa_mm.search.formats import EAGER, F32, INT8
from repa_mm.search.report import scatter


def test_picture_has_every_row_and_each_name_once():
    rows = [
        dict(candidate=name, format=kind, speedup=40 / ms, metric=metric, chosen=ms == 18, mb=1.0)
        for name, kind, ms, metric in [
            ('stock', EAGER, 40, 50.6), ('40 %', EAGER, 30, 50.4), ('40 %', INT8, 18, 50.3),
            ('40 %', F32, 20, 50.4), ('30 %', F32, 19.9, 50.4), ('9 %', F32, 15, None),
        ]
    ]  # fmt: skip
    text = scatter(rows, 'coco/bbox_mAP')
    words = [
        node.text for node in ElementTree.fromstring(text).iter() if node.tag.endswith('}text')
    ]
    for once in '40 %', '30 %', 'stock', 'chosen', '2.22 ×', EAGER, F32, INT8, 'coco/bbox_mAP':
        assert words.count(once) == 1, once
    assert '9 %' not in words and 'OpenVINO bf16' not in words
    for row in rows:
        row['metric'] = None
    assert '>MB<' in scatter(rows, '')
