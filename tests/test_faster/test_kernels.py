"""The kernels of GPUs, on a CPU in Triton's interpreter."""

import copy
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from mmpretrain.models.utils.attention import ShiftWindowMSA

from repa_mm.faster import attention, fast_window_attention_
from tests.toy import step

if not attention._HAS_OPERATORS:
    pytest.skip('needs PyTorch 2.6', allow_module_level=True)
kernels = importlib.import_module('repa_mm.faster.kernels')
DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
HALF = [torch.float16] if DEVICE == 'cpu' else [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    """As if there were a GPU, with few programs, so that each takes several windows."""
    monkeypatch.setattr(attention, 'has_kernels', lambda device: True)
    monkeypatch.setattr(kernels, '_PROGRAMS', 6)
    kernels._launch.cache_clear()
    yield
    kernels._launch.cache_clear()


@pytest.fixture
def calls(monkeypatch):
    """The maps' heights and widths of each call of the kernel."""
    found, function = [], kernels.window_attention

    def counted(qkv, bias, table, index, *how):
        found.append(how[:2])
        return function(qkv, bias, table, index, *how)

    monkeypatch.setattr(kernels, 'window_attention', counted)
    return found


def _literal(qkv, bias, table, index, height, width, window, shift, v_dims, scale):
    """Attention in (shifted) windows as Swin's paper has it: pad, roll, partition, mask."""
    batch, heads = len(qkv), table.shape[1]
    num_h, num_w = -(-height // window), -(-width // window)
    size = num_h * window, num_w * window
    maps = bias.expand(batch, *size, len(bias)).clone()
    maps[:, :height, :width] = qkv.view(batch, height, width, -1)

    def windows(x, heads):  # (B, H, W, C) to (B, windows, heads, N, C / heads)
        x = x.roll((-shift, -shift), (1, 2)).view(len(x), num_h, window, num_w, window, -1)
        x = x.transpose(2, 3).reshape(len(x), num_h * num_w, window**2, heads, -1)
        return x.transpose(2, 3)

    dims = (len(bias) - v_dims) // 2
    q, k, v = (windows(x, heads) for x in maps.split([dims, dims, v_dims], 3))
    region = torch.zeros(1, *size, 1).to(qkv)
    region[:, :shift] += 1  # comes from the other side
    region[:, :, :shift] += 2
    region = windows(region, 1)
    scores = q @ k.mT * scale + F.embedding(index, table).permute(2, 0, 1)
    scores = torch.where(region == region.mT, scores, scores - 100)
    x = (scores.softmax(-1) @ v).transpose(2, 3)
    x = x.reshape(batch, num_h, num_w, window, window, v_dims).transpose(2, 3)
    x = x.reshape(batch, *size, v_dims).roll((shift, shift), (1, 2))
    return x[:, :height, :width].reshape(batch, -1, v_dims)


def _inputs(size, dims=(8, 8), window=7, batch=1, dtype=torch.float32):
    """Queries, keys and values of two heads, their bias, the table of biases; its index."""
    channels = 2 * (2 * dims[0] + dims[1])
    shapes = (batch, size[0] * size[1], channels), (channels,), ((2 * window - 1) ** 2, 2)
    index = ShiftWindowMSA(4, 2, window).w_msa.relative_position_index
    return [torch.randn(shape).to(DEVICE, dtype) for shape in shapes], index.to(DEVICE)


def _with_gradients(function, inputs, index, *how):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs, index, *how)
    generator = torch.Generator().manual_seed(1)
    noise = torch.rand(out.shape, generator=generator, dtype=torch.double)
    out.backward(noise.to(out))
    return [out.detach(), *(x.grad for x in inputs)]


def _assert_close(actual, expected, tolerance):
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        assert (a.double() - e).abs().max() <= tolerance * e.abs().max().clamp(min=1)


@pytest.mark.parametrize(
    'size, shift, window, dims',
    [
        ((14, 7), 0, 7, (8, 8)),
        ((6, 8), 0, 7, (8, 8)),
        ((8, 13), 3, 7, (4, 8)),
        ((7, 7), 3, 7, (8, 8)),
        ((3, 5), 5, 7, (8, 2)),
        ((7, 5), 1, 4, (20, 3)),
    ],
)
def test_attention_and_its_gradients(size, shift, window, dims):
    """Maps of whole windows, padded, smaller than a window; heads of unequal widths."""
    how = *size, window, shift, 2 * dims[1], dims[0] ** -0.5
    inputs, index = _inputs(size, dims, window)
    expected = _with_gradients(_literal, [x.double() for x in inputs], index, *how)
    actual = _with_gradients(kernels.window_attention, inputs, index, *how)
    assert {x.dtype for x in actual} == {torch.float32}
    _assert_close(actual, expected, 1e-5)
    with torch.no_grad():
        assert torch.equal(kernels.window_attention(*inputs, index, *how), actual[0])


# In the interpreter, products of bfloat16 are those of integers.
@pytest.mark.parametrize('dtype', HALF)
def test_half_precision(dtype):
    """Against the exact result from the same rounded inputs."""
    how = 6, 8, 7, 3, 16, 8**-0.5
    inputs, index = _inputs((6, 8), batch=1, dtype=dtype)
    expected = _with_gradients(_literal, [x.double() for x in inputs], index, *how)
    actual = _with_gradients(kernels.window_attention, inputs, index, *how)
    assert {x.dtype for x in actual} == {dtype}
    _assert_close(actual, expected, 4 * torch.finfo(dtype).eps)


def test_large_and_nearly_constant_inputs():
    """Softmax subtracts the largest logit; what is constant among keys changes nothing."""
    how = 7, 8, 7, 3, 16, 8**-0.5
    (qkv, bias, table), index = _inputs((7, 8))
    qkv = 300 + 0.01 * qkv
    with torch.no_grad():
        expected = _literal(qkv.double(), 300 + bias.double(), table.double(), index, *how)
        error = (_literal(qkv, 300 + bias, table, index, *how) - expected).abs().max()
        actual = kernels.window_attention(qkv, 300 + bias, table, index, *how)
    assert (actual - expected).abs().max() <= 2 * error


def _module(shift=3, window=7, channels=16, **kwargs):
    stock = ShiftWindowMSA(channels, 2, window, shift, pad_small_map=True, **kwargs).to(DEVICE)
    for parameter in stock.parameters():
        parameter.data.normal_(std=0.5)
    return stock, fast_window_attention_(copy.deepcopy(stock))


@pytest.mark.parametrize('shift, bias', [(0, True), (3, True), (3, False)])
def test_module_equals_the_stock_one(shift, bias, calls):
    stock, fast = _module(shift, qkv_bias=bias)
    for size in [(6, 8), (2, 5)]:
        x = torch.randn(1, 16, size[0] * size[1], device=DEVICE).transpose(1, 2)
        expected = step(stock.double(), x.double(), size)
        _assert_close(step(fast, x, size).values(), expected.values(), 1e-5)
        with torch.no_grad():
            _assert_close([fast(x, size)], [stock(x.double(), size)], 1e-5)
    assert len(calls) == 4


def test_narrow_heads(calls, monkeypatch):
    """As a conversion leaves them: queries and keys of 3, values of 5 instead of 8 each."""
    _, fast = _module()
    fast.w_msa.qkv = nn.Linear(16, 2 * (3 + 3 + 5)).to(DEVICE)
    fast.w_msa.proj = nn.Linear(2 * 5, 16).to(DEVICE)
    x = torch.randn(2, 48, 16, device=DEVICE)
    actual = step(fast, x, (6, 8))
    assert calls
    monkeypatch.setattr(attention, 'has_kernels', lambda device: False)
    expected = step(fast.double(), x.double(), (6, 8))
    _assert_close(actual.values(), expected.values(), 1e-5)


@pytest.mark.parametrize('dtype', HALF)
def test_module_under_autocast(dtype, calls):
    stock, fast = _module()
    x = torch.randn(1, 48, 16, device=DEVICE)
    with torch.no_grad():
        expected = stock(x, (6, 8)).double()
        with torch.autocast(DEVICE, dtype):
            actual, other = fast(x, (6, 8)), stock(x, (6, 8))
    assert calls and actual.dtype == dtype
    assert (actual - expected).abs().max() <= 1.5 * (other - expected).abs().max()


def test_second_derivatives_are_refused():
    _, fast = _module()
    x = torch.randn(1, 49, 16, device=DEVICE, requires_grad=True)
    with pytest.raises(RuntimeError, match='fast_attention=False'):
        torch.autograd.grad(fast(x, (7, 7)).square().sum(), x, create_graph=True)


class _Layer(nn.Linear):
    """Not a plain linear layer: the kernel would not know what it makes of padding."""

    def forward(self, x):
        return super().forward(x) + 1


class _OtherQueries(attention.FastShiftWindowMSA):
    def qkv(self, windows, padded):
        return super().qkv(windows, padded) + 1


@pytest.mark.parametrize(
    'kwargs, change',
    [
        (dict(window=9), None),
        (dict(channels=80), None),
        (dict(), lambda fast: fast.double()),
        (dict(attn_drop=0.5), lambda fast: fast.train()),
        (dict(), lambda fast: setattr(fast.w_msa.qkv, '__class__', _Layer)),
        (dict(), lambda fast: setattr(fast, '__class__', _OtherQueries)),
        (dict(), lambda fast: setattr(fast.w_msa, 'qkv', nn.Sequential(fast.w_msa.qkv))),
    ],
)
def test_what_does_not_fit_takes_the_other_path(kwargs, change, calls):
    """Large windows, wide heads, other dtypes, dropout, other layers and subclasses."""
    _, fast = _module(**kwargs)
    fast.eval()
    if change:
        change(fast)
    weight = fast.w_msa.proj.weight
    x = torch.randn(1, 48, weight.shape[1], device=DEVICE).to(weight.dtype)
    assert fast(x, (6, 8)).shape == x.shape
    assert not calls


def test_traces(calls):
    fast = _module()[1].requires_grad_(False)
    with torch.no_grad():
        x = torch.randn(1, 48, 16, device=DEVICE)
        torch.jit.trace(lambda x: fast(x, (6, 8)), x, check_trace=False)
    assert not calls


@pytest.fixture
def gpu(monkeypatch):
    """As if there were a GPU on which a small kernel runs."""
    monkeypatch.setattr(torch.version, 'cuda', '13.0')
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: (8, 0))
    monkeypatch.setattr(torch, 'ones', lambda *shape, device: torch.zeros(*shape, device=DEVICE))


def test_where_the_kernels_run(gpu, monkeypatch):
    def runs():
        return attention._runs_kernels.__wrapped__(torch.device('cuda'))

    def fails(*args):
        raise RuntimeError('Failed to find C compiler')

    assert runs()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, 'get_device_capability', lambda device: (7, 5))
        assert not runs()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, 'repa_mm.faster.kernels', None)
        assert not runs()
    monkeypatch.setattr(kernels, 'window_attention', fails)
    with pytest.warns(UserWarning, match='slower .* RuntimeError: Failed to find C compiler'):
        assert not runs()


@pytest.mark.parametrize('step', ['compile', pytest.param('trace', marks=pytest.mark.slow)])
def test_compiles_for_gpus(step):
    """In another process, without the interpreter."""
    env = {key: value for key, value in os.environ.items() if key != 'TRITON_INTERPRET'}
    script = Path(__file__).with_name('compile_kernels.py')
    command = [sys.executable, script, kernels.__file__, step]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert not done.returncode, done.stderr
