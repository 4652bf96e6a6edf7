import copy
import itertools
from importlib import import_module

import pytest
import torch
import torch.nn as nn
from mmcv.cnn.bricks.transformer import PatchMerging
from mmpretrain.models.utils.attention import ShiftWindowMSA, WindowMSA
from torch.testing import assert_close

from repa_mm.faster import attention, fast_window_attention_, rewrite_, trace_any_size_
from repa_mm.faster.attention import FastPatchMerging, FastShiftWindowMSA
from repa_mm.models import RePaSwinTransformer
from tests.toy import step

SMALL = dict(embed_dims=24, depths=[2, 2, 2, 2], num_heads=[1, 2, 4, 8])
# Divisible by the window, padded by 1 and by 6, of one window, smaller than it.
SIZES = [(14, 21), (13, 20), (8, 15), (7, 7), (14, 7), (3, 5), (30, 2)]


def _pair(shift=0, dtype=torch.float32, **kwargs):
    stock = ShiftWindowMSA(24, 3, 7, shift, pad_small_map=True, **kwargs).to(dtype)
    for parameter in stock.parameters():
        parameter.data.normal_(std=0.5)
    fast = fast_window_attention_(copy.deepcopy(stock))
    assert type(fast) is FastShiftWindowMSA
    return stock, fast


@pytest.mark.parametrize('shift', [0, 3, 5])
@pytest.mark.parametrize('chunk', [1, 2**20])
def test_equals_the_parent(shift, chunk, relative_error, monkeypatch):
    monkeypatch.setattr(attention, '_CHUNK', chunk)
    stock, fast = _pair(shift, torch.double)
    # Without padding, a map of one window is not shifted.
    for size, pads in [(size, True) for size in SIZES] + [(size, False) for size in SIZES[:5]]:
        x = torch.randn(3, size[0] * size[1], 24).double()
        stock.pad_small_map = fast.pad_small_map = pads
        assert_close(step(fast, x, size), step(stock, x, size))
        assert fast(x[:0], size).shape == x[:0].shape
        with torch.no_grad():
            assert relative_error(fast(x, size), stock(x, size)) < 1e-10
            assert fast(x[:0], size).shape == x[:0].shape


def test_wrong_sizes():
    fast = fast_window_attention_(ShiftWindowMSA(24, 3, 7))
    with pytest.raises(AssertionError, match='pad_small_map=True'):
        fast(torch.randn(1, 18, 24), (3, 6))
    with pytest.raises(AssertionError, match="don't match"):
        fast(torch.randn(1, 18, 24), (7, 7))


def test_inference_and_training_alternate():
    """What inference mode cached must not enter an autograd graph."""
    pair = stock, fast = _pair(3, torch.double)
    size = (17, 23)  # of no other test: the caches are shared
    x = torch.randn(2, 17 * 23, 24).double()
    for frozen in (False, True):
        for module in pair:
            module.w_msa.relative_position_bias_table.requires_grad = not frozen
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                assert_close(fast(x, size), stock(x, size))
            assert_close(step(fast, x, size), step(stock, x, size))


def test_second_derivatives():
    """PyTorch differentiates attention on CPUs; the kernels of GPUs refuse."""
    x, found = torch.randn(1, 8 * 9, 24).double().requires_grad_(), []
    for module in _pair(3, torch.double):
        loss = module(x, (8, 9)).square().sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), [x, *module.parameters()]))
    assert_close(*found)


@pytest.mark.parametrize('grad', [False, True])
def test_reduced_precision(grad, relative_error):
    """No less exact than the parent; and bfloat16 weights run at all."""
    stock, fast = _pair(3)
    x = torch.randn(2, 9 * 15, 24)
    with torch.set_grad_enabled(grad):
        expected = stock(x, (9, 15))
        with torch.autocast('cpu', torch.bfloat16):
            error = relative_error(stock(x, (9, 15)), expected)
            actual = fast(x, (9, 15))
        assert actual.dtype == torch.bfloat16
        assert relative_error(actual, expected) < max(2 * error, 0.02)
        actual = fast.bfloat16()(x.bfloat16(), (9, 15))
        assert relative_error(actual, expected) < max(2 * error, 0.02)
        if grad:
            actual.float().sum().backward()
            assert fast.w_msa.qkv.weight.grad.abs().sum() > 0


def test_dropout_and_hooks(relative_error):
    """Both are where the stock module has them, also where a dropout alone is in training mode."""
    stock, fast = (m.eval() for m in _pair(3, torch.double, attn_drop=0.5, proj_drop=0.25))
    x = torch.randn(2, 14 * 14, 24).double()
    assert relative_error(fast(x, (14, 14)), stock(x, (14, 14))) < 1e-10
    fast.w_msa.attn_drop.train()
    with torch.no_grad():
        assert not torch.equal(fast(x, (14, 14)), fast(x, (14, 14)))
    for names in ([''], ['softmax'], ['qkv', 'attn_drop', 'proj_drop']):
        pair = [copy.deepcopy(module) for module in (stock, fast)]
        for module, name in itertools.product(pair, names):
            # In the place of a dropout.
            module.w_msa.get_submodule(name).register_forward_hook(
                lambda layer, args, y: 1 + (args[0] if isinstance(layer, nn.Dropout) else y) ** 2
            )
        for mode in (False, len(names) > 1):
            with torch.set_grad_enabled(mode):
                a, b = (module.train(mode)(x, (14, 14)) for module in pair)
            assert relative_error(a, b) < 1e-10


class Half(nn.Dropout):
    def forward(self, x):
        return x / 2


CHANGES = dict(
    softmax=lambda w: setattr(w, 'softmax', nn.Sequential(nn.Hardtanh(), nn.Softmax(-1))),
    other_axis=lambda w: setattr(w, 'softmax', nn.Softmax(-2)),
    acting_dropout=lambda w: setattr(w, 'attn_drop', Half()),
    forward=lambda w: setattr(w, 'forward', lambda x, mask, own=w.forward: 3 * own(x, mask)),
    adapter=lambda w: setattr(w, 'proj', nn.Sequential(w.proj, nn.Tanh())),
    subclass=lambda w: setattr(w, '__class__', Tripled),
    method=lambda a: setattr(a, 'window_reverse', lambda *x, own=a.window_reverse: 3 * own(*x)),
)


class Tripled(WindowMSA):
    def forward(self, x, mask=None):
        return 3 * super().forward(x, mask)


@pytest.mark.parametrize('name', CHANGES)
def test_what_takes_the_place_of_a_part_is_run(name, relative_error):
    """A module with such a part stays as it is; a part that comes later is run."""
    (stock, fast), size = _pair(3, torch.double), (9, 15)
    x = torch.randn(2, 9 * 15, 24).double()
    before = stock(x, size)
    for module in (stock, fast):
        CHANGES[name](module if name == 'method' else module.w_msa.eval())
    expected = stock(x, size)
    assert relative_error(expected, before) > 1e-2
    for compute in (fast, torch.compile(fast, backend='eager')):
        with torch.set_grad_enabled(compute is fast):
            assert relative_error(compute(x, size), expected) < 1e-10
    rewrite_(stock, 'window attention')
    assert type(stock) is ShiftWindowMSA


def test_backward_hooks():
    calls, x = [], torch.randn(2, 9 * 15, 24, requires_grad=True)
    for module in _pair(3):
        for part in (module.w_msa, module.w_msa.softmax, module.w_msa.attn_drop, module.drop):
            part.register_full_backward_hook(lambda m, *_: calls.append(type(m)))
        module(x, (9, 15)).sum().backward()
    assert len(calls) == 8 and calls[:4] == calls[4:]


def test_compiles_once_for_all_sizes(relative_error):
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    stock, fast = _pair(3)
    counter = CompileCounter()
    compiled = torch.compile(fast, backend=counter, fullgraph=True)
    with torch.no_grad():
        for height, width in [(14, 21), (16, 22), (13, 27), (28, 35), (9, 50)]:
            x = torch.randn(2, height * width, 24)
            assert relative_error(compiled(x, (height, width)), stock(x, (height, width))) < 1e-5
    assert counter.frame_count <= 2


def test_can_be_traced(relative_error):
    stock, fast = (m.requires_grad_(False) for m in _pair(3))
    x = torch.randn(2, 9 * 15, 24, requires_grad=True)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            traced = torch.jit.trace(lambda x: fast(x, (9, 15)), x)
        assert 'PythonOp' not in str(traced.graph)
        other = torch.randn(2, 9 * 15, 24)
        assert relative_error(traced(other), stock(other, (9, 15))) < 1e-5


@pytest.mark.parametrize(
    'kernel_size, padding', [(2, 'corner'), (3, 'corner'), (3, 'same'), ((2, 3), 'same')]
)
def test_patch_merging(kernel_size, padding, randomize):
    stock = randomize(PatchMerging(8, 16, kernel_size, padding=padding)).double()
    fast = copy.deepcopy(stock)
    rewrite_(fast, 'window attention')
    assert type(fast) is FastPatchMerging
    for size in [(6, 12), (7, 10), (1, 1), (13, 5)]:
        x = torch.randn(2, size[0] * size[1], 8).double()
        assert fast(x, size)[1] == stock(x, size)[1]
        assert_close(step(fast, x, size), step(stock, x, size))
    for name in ('adaptive_padding', 'sampler'):
        for module in (stock, fast):
            module.get_submodule(name).register_forward_hook(lambda layer, args, y: y.sin() + 1)
        assert_close(step(fast, x, size), step(stock, x, size))
    rewrite_(stock, 'window attention')
    assert type(stock) is PatchMerging


@pytest.mark.parametrize('package', ['mmpretrain', 'mmdet', 'mmseg'])
def test_whole_swins(package, randomize, relative_error):
    arch = SMALL
    if package == 'mmpretrain':
        arch = dict(arch=SMALL, out_indices=(0, 1, 2, 3), pad_small_map=True)
    stock = import_module(f'{package}.models.backbones').SwinTransformer(**arch)
    randomize(stock).eval()
    model = nn.ModuleDict(dict(backbone=copy.deepcopy(stock)))
    assert fast_window_attention_(model) is model
    fast = model.backbone
    assert sum(isinstance(m, FastShiftWindowMSA) for m in fast.modules()) == 8
    assert sum(isinstance(m, FastPatchMerging) for m in fast.modules()) == 3
    assert list(fast.state_dict()) == list(stock.state_dict())
    x = torch.randn(2, 3, 65, 90)
    with torch.no_grad():
        for actual, expected in zip(fast(x), stock(x)):
            assert relative_error(actual, expected) < 1e-5
    copy.deepcopy(stock).load_state_dict(fast.state_dict())
    fast_window_attention_(fast)  # once more changes nothing


@pytest.mark.parametrize('deploy', [False, True])
def test_repa_swin_uses_it(deploy, relative_error):
    fast, stock = (
        RePaSwinTransformer(SMALL, pad_small_map=True, deploy=deploy, fast_attention=fast).eval()
        for fast in (True, False)
    )
    assert any(isinstance(m, FastShiftWindowMSA) for m in fast.modules())
    assert not any(isinstance(m, FastShiftWindowMSA) for m in stock.modules())
    stock.load_state_dict(fast.state_dict())
    x = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        assert relative_error(fast(x)[0], stock(x)[0]) < 1e-5


class Other(ShiftWindowMSA):
    pass


class AdaptivePadding(nn.Identity):
    """Has the name and the attributes of mmcv's."""

    kernel_size = stride = 2, 2
    dilation = 1, 1


@pytest.mark.parametrize(
    'module',
    [
        nn.Linear(2, 2),
        Other(24, 3, 7),
        AdaptivePadding(),
        PatchMerging(8, 16, kernel_size=3, stride=2),
        PatchMerging(8, 16, dilation=2),
        PatchMerging(8, 16, padding=0),
    ],
)
def test_nothing_to_make_faster(module):
    kind = type(module)
    with pytest.raises(ValueError, match=f'nothing to make faster: {kind.__name__}'):
        fast_window_attention_(module)
    trace_any_size_(module)
    assert type(module) is kind
