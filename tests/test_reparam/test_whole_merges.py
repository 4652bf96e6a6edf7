"""A merge knows all that a training form computes, or says what it does not know."""

import copy

import pytest
import torch
import torch.nn as nn
from torch.nn.utils import parametrizations, prune, weight_norm

from repa_mm.reparam import (
    ChannelIdleFFN,
    MergedFFN,
    reparameterize,
    reparameterize_,
    set_shortcut_,
)

X = torch.linspace(-2, 2, 2 * 5 * 8).sin().view(2, 5, 8)


class Doubled(ChannelIdleFFN):
    def forward(self, x, identity=None):
        return 2 * super().forward(x)


class Literal(ChannelIdleFFN):
    def forward_literal(self, x):
        return super().forward_literal(x) + 1


def _double(module):
    own = module.forward
    module.forward = lambda *args: 2 * own(*args)


def _hook(module):
    module.register_forward_hook(lambda module, args, y: 2 * y)


def _pre_hook(module):
    module.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def to(name, value):
    return lambda ffn: setattr(ffn, name, value)


@pytest.mark.parametrize(
    'change, message',
    [
        (to('__class__', Doubled), r'Doubled overrides forward\(\)'),
        (to('__class__', Literal), r'Literal overrides forward_literal\(\)'),
        (_double, r'ChannelIdleFFN has a replaced forward\(\)'),
        (lambda ffn: _double(ffn.fc1), r"'fc1' \(Linear\) has a replaced forward\(\)"),
        (_hook, r'ChannelIdleFFN has a hook.*handle.remove'),
        (_pre_hook, r'ChannelIdleFFN has a hook.*handle.remove'),
        (lambda ffn: _hook(ffn.act), r"'act' \(GELU\) has a hook"),
        (lambda ffn: ffn.register_full_backward_hook(print), 'ChannelIdleFFN has a hook, print'),
        (to('norm1', nn.InstanceNorm1d(8, affine=True)), 'its norm1 is a InstanceNorm1d'),
        (to('norm2', nn.LayerNorm(32)), 'its norm2 is a LayerNorm'),
        (to('dropout_layer', nn.Tanh()), 'its dropout_layer is a Tanh'),
        (lambda ffn: weight_norm(ffn.fc1), r"'fc1' .* hook, WeightNorm.*remove_weight_norm"),
        (
            lambda ffn: prune.random_unstructured(ffn.fc2, 'weight', 0.4),
            r"'fc2' \(Linear\) has a hook, RandomUnstructured.*prune.remove",
        ),
        (
            lambda ffn: parametrizations.spectral_norm(ffn.fc1),
            r"'fc1' \(ParametrizedLinear\) has parametrized.*remove_parametriz",
        ),
    ],
)
@pytest.mark.filterwarnings('ignore')  # of the old norms, which are deprecated
def test_what_would_be_lost_is_refused(change, message, randomize):
    model = nn.Sequential(randomize(ChannelIdleFFN(8, 32)), randomize(ChannelIdleFFN(8, 32)))
    change(model[1])
    classes = [type(m) for m in model.modules()]
    for merge in (reparameterize, reparameterize_):
        with pytest.raises(ValueError, match=f"cannot merge '1': .*{message}"):
            merge(model)
    with pytest.raises(ValueError, match=message):
        model[1].merge()
    assert [type(m) for m in model.modules()] == classes


def test_a_subclass_with_a_merge_of_its_own_is_trusted(randomize, relative_error):
    class Scaled(Doubled):
        def merge(self):
            merged = nn.Module.__new__(MergedTwice)
            merged.__dict__ = super().merge().__dict__
            return merged

    class MergedTwice(MergedFFN):
        def inference(self, x, identity=None):
            return 2 * super().inference(x)

    ffn = randomize(Scaled(8, 32)).eval()
    assert relative_error(reparameterize(ffn)(X), ffn(X)) < 1e-5


def test_what_is_merged_keeps_its_shortcut(randomize):
    ffn = randomize(ChannelIdleFFN(8, 32)).eval()
    outside = set_shortcut_(reparameterize(ffn), 'outside').bfloat16()
    again = reparameterize(outside)
    assert torch.equal(again.fc1.weight, outside.fc1.weight) and again.shortcut
    assert not set_shortcut_(outside.float(), 'inside').shortcut


@pytest.mark.parametrize('inplace', [False, True])
def test_merged_in_inference_mode(inplace, randomize, relative_error):
    ffn = randomize(ChannelIdleFFN(8, 32)).eval()
    expected = ffn(X).detach()
    with torch.inference_mode():
        model = (reparameterize_ if inplace else reparameterize)(nn.Sequential(ffn))
        merged = randomize(ChannelIdleFFN(8, 32)).eval().merge()
    for tensor in (*model.parameters(), *merged.parameters()):
        assert not tensor.is_inference()
    x = X.clone().requires_grad_()
    model(x).sum().backward()
    assert x.grad.isfinite().all()
    assert relative_error(copy.deepcopy(model)(X), expected) < 1e-5
    set_shortcut_(model[0], 'outside')
    assert relative_error(model(X), expected) < 1e-5


class Tokens(nn.Module):
    """An FFN between other modules, with a class of its own for the trace."""

    def __init__(self, ffn):
        super().__init__()
        self.before, self.ffn = nn.Linear(8, 8), ffn

    def forward(self, x):
        return self.ffn(self.before(x))


@pytest.mark.filterwarnings('ignore')
def test_the_shortcut_outside_in_an_exported_program(randomize, relative_error):
    model = randomize(Tokens(ChannelIdleFFN(8, 32))).eval()
    expected = model(X).detach()
    deployed = set_shortcut_(reparameterize(model), 'outside')
    assert deployed.ffn.shortcut
    saved = copy.deepcopy(deployed.state_dict())
    converted = torch.export.export(deployed, (X,)).module()
    with torch.no_grad():
        assert relative_error(converted(X), expected) < 1e-5
        assert relative_error(deployed(X), expected) < 1e-5
    # What is saved has the shortcut inside, before and after.
    inside = reparameterize(model).state_dict()
    for state_dict in (saved, deployed.state_dict()):
        for key, value in inside.items():
            assert torch.allclose(state_dict[key], value, atol=1e-5), key


def test_linear_layers_without_a_bias(randomize, relative_error):
    ffn = randomize(ChannelIdleFFN(8, 32))
    ffn.fc1.bias = ffn.fc2.bias = None
    assert ffn(X.repeat(1, 100, 1)).shape == (2, 500, 8)
    ffn.eval()
    assert relative_error(ffn.merge()(X), ffn(X)) < 1e-5
