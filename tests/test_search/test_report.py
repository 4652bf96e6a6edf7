"""Pictures of the report: where a label is, and what is drawn in enlarged images."""

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
from mmengine.structures import BaseDataElement, InstanceData, PixelData

from repa_mm.search.formats import EAGER, F32, INT8
from repa_mm.search.report import enlarged, scatter


@pytest.mark.parametrize('key', ['data', 'sem_seg'])
def test_what_is_found_is_enlarged_with_its_image(key):
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (90, 160, 3), dtype=np.uint8)
    box, mask = torch.tensor([[8.0, 16.0, 72.0, 48.0]]), torch.zeros(1, 90, 160, dtype=torch.bool)
    mask[0, 16:48, 8:72] = True
    field = {'data': 'pred_sem_seg', 'sem_seg': 'pred_panoptic_seg'}[key]
    sample = BaseDataElement(pred_instances=InstanceData(bboxes=box, masks=mask))
    sample.set_field(PixelData(**{key: 3 * mask.int()}), field, dtype=PixelData)
    larger, sample = enlarged(image, sample)
    assert larger.shape == (270, 480, 3)
    left, top, right, bottom = sample.pred_instances.bboxes[0].int().tolist()
    for maps in sample.pred_instances.masks, sample.get(field).get(key) == 3:
        assert maps.shape == (1, 270, 480)
        assert maps[0, top:bottom, left:right].all() and maps.sum() == 9 * mask.sum()
    same, _ = enlarged(larger, sample)
    assert same is larger


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
