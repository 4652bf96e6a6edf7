"""What whole models are made of."""

import json

import pytest
import torch

from repa_mm.apis import open_model
from repa_mm.export import Session
from repa_mm.export.whole import AveragePool
from repa_mm.io.configs import load_config

pytest.importorskip('onnx')


def test_average_pool_is_the_adaptive_one():
    x = torch.randn(2, 3, 13, 22, dtype=torch.float64)
    for size in [(1, 1), (2, 2), (3, 5), (6, 6), (13, 22)]:
        expected = torch.nn.AdaptiveAvgPool2d(size)(x)
        torch.testing.assert_close(AveragePool(size)(x), expected)


def test_names_of_classes(exported):
    """Those of the config, or of its data set."""
    config, checkpoint, _, file = exported('retinanet')
    assert json.loads(Session(file).metadata['classes'])[:2] == ['zero', 'one']
    cfg = load_config(config)
    del cfg.test_dataloader.dataset['metainfo']
    assert len(open_model(cfg, checkpoint, merge=True).dataset_meta['classes']) == 80
