import copy
import itertools

import pytest
import torch
from mmcv.cnn import fuse_conv_bn
from mmseg.models import UPerHead

from repa_mm.faster import fuse_conv_bn_, rewrite_
from repa_mm.faster.fusing import FusedConvModule
from repa_mm.faster.uper_head import FastUPerHead
from tests.conftest import _randomize

CHANNELS = [4, 6, 8, 10]
KWARGS = dict(in_channels=CHANNELS, in_index=[0, 1, 2, 3], channels=5, num_classes=3)


def _heads(align_corners=False):
    options = dict(norm_cfg=dict(type='BN'), dropout_ratio=0, align_corners=align_corners)
    head = _randomize(UPerHead(**KWARGS, **options))
    fast = copy.deepcopy(head)
    assert [rewrite.name for _, rewrite in rewrite_(fast, 'train')] == ['UPerHead']
    assert type(fast) is FastUPerHead
    return head.double(), fast.double()


def _maps(*sizes, batch=2):
    return [torch.randn(batch, channels, *size).double() for channels, size in zip(CHANNELS, sizes)]


SIZES = [
    [(16, 16), (8, 8), (4, 4), (2, 2)],
    [(13, 22), (7, 11), (4, 6), (2, 3)],  # of an image of no round size
    [(9, 5), (9, 5), (5, 3), (1, 1)],
]


@pytest.mark.parametrize('align_corners', [False, True])
@pytest.mark.parametrize('sizes', SIZES)
@pytest.mark.filterwarnings('ignore:When align_corners')
def test_is_the_stock_head(sizes, align_corners, relative_error):
    stock, fast = (m.eval() for m in _heads(align_corners))
    for batch in (1, 3):
        maps = _maps(*sizes, batch=batch)
        expected = stock(maps)
        assert relative_error(fast(maps), expected) < 1e-12
        for head in map(copy.deepcopy, (stock, fast)):
            folded = fuse_conv_bn(head)
            assert relative_error(folded(maps), expected) < 1e-12


@pytest.mark.parametrize('sizes', SIZES[:2])
def test_gradients(sizes, relative_error):
    grads = []
    maps = _maps(*sizes)
    for head in _heads():
        # Where nothing is degenerate: no maps of one pixel to normalize.
        head.train().psp_modules.eval()
        inputs = [x.clone().requires_grad_() for x in maps]
        head(inputs).pow(3).sum().backward()
        grads.append(
            [x.grad for x in inputs]
            + [p.grad for p in head.parameters()]
            + [b for b in head.buffers() if b.dim()]
        )
    assert len(grads[0]) > 40
    for expected, actual in zip(*grads):
        assert relative_error(actual, expected) < 1e-10


def test_half_precision(relative_error):
    stock, fast = (m.float().eval() for m in _heads())
    maps = [x.float() for x in _maps(*SIZES[1])]
    expected = stock(maps)
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        errors = [relative_error(m(maps).float(), expected) for m in (stock, fast)]
    assert errors[1] < max(2 * errors[0], 2e-2)


@pytest.mark.filterwarnings('ignore:When align_corners')
def test_what_takes_the_place_of_a_part_is_run(relative_error):
    maps = _maps(*SIZES[1])

    def of(head, name, change):
        head.fpn_bottleneck.activate.inplace = False  # which PyTorch refuses after a hook
        change(head.fpn_bottleneck.get_submodule(name) if name else head.fpn_bottleneck)
        return head

    def hooks(module):
        module.register_forward_hook(lambda layer, args, y: y.sin() + 1)
        module.register_full_backward_hook(lambda *_: calls.append(1))

    def twice(module):
        module.forward = lambda x, own=module.forward: 2 * own(x)

    for name, change in itertools.product(('', 'conv', 'bn', 'activate'), (hooks, twice)):
        stock, fast = (of(head.eval(), name, change) for head in _heads())
        calls, expected = [], stock(maps)
        assert relative_error(fast(maps), expected) < 1e-12
        for head in (stock, fast):
            calls.clear()
            head(maps).sum().backward()
            assert len(calls) == (change is hooks)
        is_read = name in ('', 'conv')
        assert bool(rewrite_(stock, 'train')) != is_read


def test_fused(relative_error):
    stock, fast = (m.eval() for m in _heads())
    maps = _maps(*SIZES[1])
    fused = fuse_conv_bn_(copy.deepcopy(fast))
    assert type(fused.fpn_bottleneck) is FusedConvModule and fused.is_ordinary()
    assert relative_error(fused(maps), stock(maps)) < 1e-12


def test_other_convolutions_stay():
    head, kwargs = UPerHead(**KWARGS), dict(KWARGS, conv_cfg=dict(type='ConvWS'))
    head.fpn_bottleneck.conv.padding_mode = 'reflect'
    assert not rewrite_(head, 'train') and not rewrite_(UPerHead(**kwargs), 'train')
    with pytest.raises(ValueError, match='needs ordinary convolutions, but got ConvWS2d'):
        FastUPerHead(**kwargs)
