import copy
import pickle

import pytest
import torch
from mmcv.cnn.bricks.transformer import PatchMerging
from mmpretrain.models import SwinTransformer
from mmpretrain.models.utils.attention import ShiftWindowMSA

import repa_mm
from repa_mm.models import (FastSwinTransformer, RePaSwinTransformer,
                            attention, fast_window_attention)
from repa_mm.models.attention import FastPatchMerging, FastShiftWindowMSA

SMALL = dict(embed_dims=24, depths=[2, 2, 2, 2], num_heads=[1, 2, 4, 8])
# Divisible by the window, padded by 1 and by 6, of one window, smaller than it.
SIZES = [(14, 21), (13, 20), (8, 15), (7, 7), (14, 7), (3, 5), (30, 2)]


def _pair(shift=0, dtype=torch.float32, **kwargs):
    stock = ShiftWindowMSA(
        24, 3, 7, shift, pad_small_map=True, **kwargs).to(dtype)
    for parameter in stock.parameters():
        parameter.data.normal_(std=0.5)
    fast = fast_window_attention(copy.deepcopy(stock))
    assert type(fast) is FastShiftWindowMSA
    return stock, fast


def _noise(like):
    generator = torch.Generator().manual_seed(1)
    return torch.rand(like.shape, generator=generator).to(like.dtype)


def _run(module, x, size):
    """Output and all gradients."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = module(x, size)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(_noise(y))
    return [y.detach(), x.grad] + [p.grad for p in module.parameters()]


@pytest.mark.parametrize('shift', [0, 3, 5])
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-5),
                                              (torch.float64, 1e-10)])
@pytest.mark.parametrize('chunk', [1, 2**20])
def test_equals_the_parent(shift, dtype, tolerance, chunk, relative_error,
                           monkeypatch):
    monkeypatch.setattr(attention, '_CHUNK', chunk)
    stock, fast = _pair(shift, dtype)
    for height, width in SIZES * 2:
        x = torch.randn(3, height * width, 24, dtype=dtype)
        for actual, expected in zip(
                _run(fast, x, (height, width)),
                _run(stock, x, (height, width))):
            assert actual.shape == expected.shape
            assert relative_error(actual, expected) < tolerance
        with torch.no_grad():
            assert relative_error(
                fast(x, (height, width)), stock(x,
                                                (height, width))) < tolerance
