"""What prepares models for GPUs, on a CPU with the kernels in Triton's interpreter."""

import copy

import pytest
import torch
import torch.nn as nn
from mmcv.ops import RoIAlign
from mmpretrain.models import PoolFormer

from repa_mm import config_path
from repa_mm.apis import open_model
from repa_mm.faster import attention, faster_on_gpu_, rewrite, rewrite_
from repa_mm.io.configs import load_config

needs_operators = pytest.mark.skipif(not attention._HAS_OPERATORS, reason='needs PyTorch 2.6')
SMALL = {'model.backbone.arch.depths': [2, 1, 1, 1]}


def _model(task, repa='', **kwargs):
    cfg = load_config(config_path(f'demo/{task}_{repa}swin_digits.py'), SMALL)
    return open_model(cfg, **kwargs)


def _features(model, x):
    """What the neck or the segmentor's head returns, from the backbone's maps."""
    maps = model.backbone(x)
    return model.neck(maps) if hasattr(model, 'neck') else [model.decode_head(maps)]


def _formats(module):
    weights = [p for p in module.parameters() if p.dim() == 4 and max(p.shape[2:]) > 1]
    return {w.is_contiguous(memory_format=torch.channels_last) for w in weights}


@needs_operators
@pytest.mark.parametrize('task', ['retinanet', 'mask_rcnn', 'upernet'])
@torch.no_grad()
def test_prepared_models_compute_the_same(task, monkeypatch, relative_error):
    stock = _model(task)
    model = copy.deepcopy(stock)
    assert rewrite_(model, 'train', 'infer')
    prepared = copy.deepcopy(model)
    with monkeypatch.context() as patch:
        patch.setattr(rewrite, 'is_on_gpu', lambda module: True)
        assert faster_on_gpu_(prepared) is prepared
    assert list(prepared.state_dict()) == list(model.state_dict())
    # RoIAlign reads the neck's maps.
    assert task == 'upernet' or _formats(prepared.neck) == {task == 'retinanet'}
    head = dict(retinanet='bbox_head', mask_rcnn='rpn_head', upernet='decode_head')[task]
    assert _formats(getattr(prepared, head)) == {True}

    x = torch.randn(1, 3, 32, 32)
    expected = _features(stock, x)
    with torch.autocast('cpu', torch.float16):
        of_stock = _features(stock, x)
        monkeypatch.setattr(attention, 'has_kernels', lambda device: True)
        found = _features(prepared, x)
    for a, b, exact in zip(found, of_stock, expected, strict=True):
        assert a.dtype == b.dtype
        assert relative_error(a, exact) < 2 * relative_error(b, exact) + 1e-3


def test_maps_for_operators_of_mmcv_stay_contiguous():
    model = nn.ModuleDict(dict(backbone=PoolFormer('s12')))
    assert rewrite_(copy.deepcopy(model), 'infer')
    model['roi_layer'] = RoIAlign(7)
    assert not rewrite_(model, 'infer')


def test_on_a_cpu_nothing_changes():
    model = _model('retinanet', 'repa_', merge=True)
    before = {name: (type(m), _formats(m)) for name, m in model.named_modules()}
    assert faster_on_gpu_(model) is model
    assert {name: (type(m), _formats(m)) for name, m in model.named_modules()} == before
    assert not attention.has_kernels(torch.device('cpu'))


@pytest.mark.slow
@pytest.mark.parametrize('task', ['retinanet', 'upernet'])
@torch.no_grad()
def test_compiles_without_a_break(task, relative_error):
    """Backbone, neck and head of a deploy form: one graph for images of any size."""
    from torch._dynamo.testing import CompileCounter

    model = _model(task, 'repa_', merge=True)
    torch._dynamo.reset()
    counter, head = CompileCounter(), getattr(model, 'bbox_head', None) or model.decode_head
    neck = getattr(model, 'neck', nn.Identity())

    def run(x):
        maps = head(neck(model.backbone(x)))
        return maps[0][0] if task == 'retinanet' else maps

    compiled = torch.compile(run, backend=counter, fullgraph=True, dynamic=True)
    for size in (192, 224), (256, 320):  # more than one window in each stage
        x = torch.randn(1, 3, *size)
        assert relative_error(compiled(x), run(x)) < 1e-4
    assert counter.frame_count == 1
