"""Formats of a GPU, as far as a CPU can run them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
from mmengine.dataset import pseudo_collate
from mmengine.structures import BaseDataElement, InstanceData, PixelData

from repa_mm.search.formats import (
    EAGER,
    FORMATS,
    GRAPHS,
    PIXEL,
    Padded,
    divisor_for,
    in_format_,
    installed_formats,
)


def test_formats_of_a_gpu():
    found, reasons = installed_formats('cuda:0')
    assert found == [EAGER, 'PyTorch f16', 'PyTorch bf16', GRAPHS] and not reasons


class Detector(nn.Module):
    """A model whose results have the types in which it computes."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(4, 4)

    def test_step(self, data):
        x = self.backbone(data)
        found = InstanceData(scores=x, labels=torch.arange(len(x)))
        return [BaseDataElement(pred_instances=found, pred_sem_seg=PixelData(logits=x[None]))]


def test_a_model_under_autocast():
    model, data = Detector(), torch.randn(3, 4)
    assert in_format_(model, FORMATS[EAGER]) is model
    (found,) = in_format_(model, FORMATS['PyTorch bf16']).test_step(data)
    (expected,) = model.test_step(data)
    # Computed in bfloat16, and given as what NumPy has.
    for a, b in (
        (found.pred_instances.scores, expected.pred_instances.scores),
        (found.pred_sem_seg.logits, expected.pred_sem_seg.logits),
    ):
        assert a.dtype == torch.float32 and torch.equal(a, a.bfloat16().float())
        assert 0 < (a - b).abs().max() < 0.05
    assert found.pred_instances.labels.dtype == torch.int64


def test_padding_is_that_of_the_test_pipeline():
    """Of few sizes with few more pixels; a config's ``Pad`` gives the same images."""
    transforms = pytest.importorskip('mmdet.datasets.transforms')
    assert divisor_for({(800, 1333), (1333, 800)}) is None
    sizes = {(800, 1067 + 13 * i) for i in range(20)} | {(1100, 800)}
    divisor = divisor_for(sizes)
    padded = {(-(-h // divisor) * divisor, -(-w // divisor) * divisor) for h, w in sizes}
    assert len(padded) <= 4 and max(h * w for h, w in padded) < 1.15 * 800 * 1333
    image = np.random.default_rng(0).integers(0, 255, (100, 130, 3), np.uint8)
    pad = transforms.Pad(size_divisor=96, pad_val=dict(img=PIXEL))
    pack = transforms.PackDetInputs(meta_keys=('img_shape', 'scale_factor'))
    first = dict(img=image, img_shape=image.shape[:2], scale_factor=(1.0, 1.0))
    expected, given = pack(pad(dict(first))), pseudo_collate([pack(dict(first))])
    model = SimpleNamespace(test_step=lambda data: data)
    found = Padded(model, 96).test_step(given)
    assert torch.equal(found['inputs'][0], expected['inputs'])
    shapes = [x.img_shape for x in (found['data_samples'][0], expected['data_samples'])]
    assert shapes == [(192, 192)] * 2
