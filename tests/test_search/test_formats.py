"""Formats of a GPU, as far as a CPU can run them."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
from mmengine.dataset import pseudo_collate
from mmengine.structures import BaseDataElement, InstanceData, PixelData

from repa_mm.export import Session
from repa_mm.search import formats
from repa_mm.search.formats import (
    EAGER,
    FORMATS,
    ORT_CUDA,
    PIXEL,
    TENSORRT,
    Padded,
    divisor_for,
    in_format,
    installed_formats,
)


@pytest.mark.parametrize(
    'providers, files',
    [
        (['CPUExecutionProvider'], []),
        (['TensorrtExecutionProvider', 'CUDAExecutionProvider'], [ORT_CUDA, TENSORRT]),
    ],
)
def test_formats_of_a_gpu(monkeypatch, providers, files):
    runtime = SimpleNamespace(get_available_providers=lambda: providers)
    monkeypatch.setitem(sys.modules, 'onnxruntime', runtime)
    monkeypatch.setattr(formats, 'find_spec', lambda name: True)
    found, reasons = installed_formats('cuda:0')
    floats = ['PyTorch', 'PyTorch f16', 'PyTorch bf16']
    assert found == [*floats, *(f'{name}, compiled' for name in floats), *files] and not reasons
    assert not any(FORMATS[name].file == 'int8' for name in found)


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
    assert in_format(model, FORMATS[EAGER]) is model
    (found,) = in_format(model, FORMATS['PyTorch bf16']).test_step(data)
    (expected,) = model.test_step(data)
    # Computed in bfloat16, and given as what NumPy has.
    for a, b in (
        (found.pred_instances.scores, expected.pred_instances.scores),
        (found.pred_sem_seg.logits, expected.pred_sem_seg.logits),
    ):
        assert a.dtype == torch.float32 and torch.equal(a, a.bfloat16().float())
        assert 0 < (a - b).abs().max() < 0.05
    assert found.pred_instances.labels.dtype == torch.int64


def test_a_compiled_copy(monkeypatch):
    compiled = []
    monkeypatch.setattr(formats, 'compile_', lambda model: compiled.append(model) or model)
    model = Detector()
    found = in_format(model, FORMATS['PyTorch bf16, compiled'])
    assert compiled == [found.model] and found.model is not model
    assert in_format(model, FORMATS['PyTorch, compiled']) is compiled[1]


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


@pytest.mark.parametrize('kind, wanted', [('cuda', 'CUDA'), ('tensorrt', 'Tensorrt')])
def test_providers_of_a_gpu(monkeypatch, kind, wanted):
    """A provider that does not load is an error, where ONNX Runtime would go on without it."""
    given = []

    class Runtime:
        def __init__(self, file, options, providers):
            given[:] = [p if isinstance(p, str) else p[0] for p in providers]

        def get_providers(self):
            return loaded

        def get_modelmeta(self):
            return SimpleNamespace(custom_metadata_map={})

        get_outputs = get_overridable_initializers = lambda self: []

    monkeypatch.setattr('onnxruntime.InferenceSession', Runtime)
    loaded = ['TensorrtExecutionProvider', 'CUDAExecutionProvider', 'CPUExecutionProvider']
    Session(b'', kind)
    assert given[0] == f'{wanted}ExecutionProvider' and given[-1] == 'CPUExecutionProvider'
    loaded = ['CPUExecutionProvider']
    with pytest.raises(RuntimeError, match=f'could not load {wanted}ExecutionProvider'):
        Session(b'', kind)
