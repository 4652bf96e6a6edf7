"""Formats of a GPU, as far as a CPU can run them."""

import pytest
import torch
import torch.nn as nn
from mmengine.structures import BaseDataElement, InstanceData, PixelData

from repa_mm.search.formats import (
    BF16,
    EAGER,
    F32,
    FORMATS,
    GRAPHS,
    INT8,
    ORT,
    in_format_,
    installed_formats,
    matching,
    precision_of,
)  # fmt: skip


def test_formats_of_a_gpu():
    found, reasons = installed_formats('cuda:0')
    assert found == [EAGER, 'PyTorch f16', 'PyTorch bf16', GRAPHS] and not reasons
    assert installed_formats('cuda:0', ['graphs', 'openvino']) == ([GRAPHS], [])


def test_formats_by_parts_of_their_names():
    assert matching(['f32', 'runtime']) == [ORT, F32] and matching([]) == [*FORMATS]
    assert matching('OpenVINO f32') == [F32]
    assert installed_formats('cpu', ['F32'])[0] == [F32]
    with pytest.raises(ValueError, match="no format has 'tensorrt' in its name: PyTorch, .*int8"):
        matching(['f32', 'tensorrt'])


def test_precisions():
    assert [precision_of(kind) for kind in (ORT, F32, BF16)] == ['f32', 'f32', 'bf16']
    assert precision_of(INT8) in ('f32', 'bf16')  # as the processor has it


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
