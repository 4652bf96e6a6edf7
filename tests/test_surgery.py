"""Copies of models whose methods were replaced."""

import functools
import types
import weakref

import pytest
import torch
import torch.nn as nn

from repa_mm.reparam import ChannelIdleFFN, reparameterize
from repa_mm.surgery import copied

X = torch.linspace(-2, 2, 2 * 5 * 8).sin().view(2, 5, 8)


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


def test_functions_of_the_original_are_refused_by_name():
    model = nn.Sequential(Layer(), Layer())
    model[1].forward = lambda x: x  # without a reference
    assert torch.equal(copied(model)[1](X), X)
    own = model[1].forward
    for forward in (
        lambda x: own(x),
        lambda x, layer=model[1]: layer.twice(x),
        types.MethodType(lambda self, x: own(x), model[1]),
        functools.partial(lambda x, times: times * own(x), times=2),
    ):
        model[1].forward = forward
        for copy in (copied, reparameterize):
            with pytest.raises(ValueError, match=r"forward\(\) of '1' \(Layer\).*del module"):
                copy(model)
