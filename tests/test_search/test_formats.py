"""Formats of a GPU, as far as a CPU can run them."""

import torch
import torch.nn as nn
from mmengine.structures import BaseDataElement, InstanceData, PixelData

from repa_mm.search.formats import EAGER, FORMATS, GRAPHS, in_format_, installed_formats


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
