"""Modules that are what their class builds, and copies of those whose methods were replaced."""

import functools
import math
import threading
import types
import weakref

import pytest
import torch
import torch.nn as nn
from mmengine.runner.activation_checkpointing import wrap_forward

from repa_mm.reparam import ChannelIdleFFN, reparameterize
from repa_mm.surgery import copied, has_stock_forward

X = torch.linspace(-2, 2, 2 * 5 * 8).sin().view(2, 5, 8)


LOCK = threading.Lock()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ffn = ChannelIdleFFN(8, 32, norm_cfg=None)

    def forward(self, x):
        return self.ffn(x)

    def twice(self, x, times=2):
        return times * self.ffn(x)


def _checkpointed(forward, reference, offload, *args, **kwargs):
    return forward(reference(), *args, **kwargs)


def _referred(x, ref):
    return ref().twice(x)


def as_fairscale_does(layer):
    """Replace forward() as ``checkpoint_wrapper`` does."""
    reference = weakref.ref(layer)
    layer.forward = functools.partial(_checkpointed, type(layer).forward, reference, False)


@pytest.mark.filterwarnings('ignore:None of the inputs')  # of checkpointing
@pytest.mark.parametrize('copy', [reparameterize, lambda model: copied(copied(model))])
@pytest.mark.parametrize(
    'forward',
    [
        lambda layer: as_fairscale_does(layer) or layer.forward,
        lambda layer: functools.partial(lambda ffn, x: ffn()(x), weakref.ref(layer.ffn)),
        lambda layer: functools.partial(_referred, ref=weakref.ref(layer)),
        lambda layer: torch.compile(layer.forward, backend='eager'),  # as MMEngine
        lambda layer: types.MethodType(Layer.twice, layer),
        lambda layer: functools.partial(layer.twice),
        lambda layer: wrap_forward(layer.forward),  # as MMEngine's activation checkpointing
        lambda layer: lambda x, other=[layer]: other[0].twice(x),
        lambda layer: lambda x, *, other=layer: other.twice(x),
        lambda layer: types.MethodType(lambda self, x: self.twice(x) + layer.ffn(x), layer),
        lambda layer: functools.partial(lambda x, times: layer.twice(x, times), times=3),
        lambda layer: lambda x, held=(math, LOCK): layer.twice(x) * held[0].pi,
    ],
)
def test_a_copy_runs_its_own_modules(forward, copy, randomize, relative_error):
    model = randomize(nn.Sequential(Layer())).eval()
    model[0].forward = forward(model[0])
    with torch.no_grad():
        expected = model(X)
        other = copy(model)
        for parameter in model.parameters():  # training goes on
            parameter.zero_()
        assert relative_error(other(X), expected) < 1e-5
        assert not torch.equal(model(X), expected)


def test_a_function_of_no_module_stays_the_same():
    model = nn.Sequential(Layer())
    for forward in (as_fairscale_does, lambda x, times=2: times * x, functools.partial(_referred)):
        model[0].forward = forward
        own = copied(model)[0].forward
        assert getattr(own, 'func', own) is getattr(forward, 'func', forward)


def test_has_stock_forward():
    class Other(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    def holds(change=None, name='layer', **children):
        model = nn.Module()
        model.layer, model.act = nn.Linear(2, 2), nn.GELU()
        if change:
            change(model.get_submodule(name))
        return has_stock_forward(model, **children)

    children = dict(layer=(nn.Conv2d, nn.Linear), act=(nn.GELU,))
    assert holds(**children) and not holds(layer=(nn.Conv2d,)) and not holds(none=(nn.Linear,))
    hooks = 'forward_hook', 'forward_pre_hook', 'full_backward_hook', 'full_backward_pre_hook'
    changes = [lambda m, k=kind: getattr(m, f'register_{k}')(lambda *_: None) for kind in hooks]
    changes.append(lambda m: setattr(m, 'forward', m.forward))
    for change in changes:
        assert not holds(change, '') and not holds(change, **children) and holds(change)
    for change in (
        lambda layer: nn.utils.parametrizations.weight_norm(layer),
        lambda layer: setattr(layer, '__class__', Other),
    ):
        assert not holds(change, **children) and holds(change)
