"""What would give a wrong answer without a word."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from repa_mm.reparam import ChannelIdleFFN, reparameterize, reparameterize_, set_shortcut_

GENERATOR = torch.Generator().manual_seed(0)


def scrambled(module):
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            low, high = (0.5, 1.5) if name.endswith('running_var') else (-0.4, 0.4)
            tensor.add_(torch.empty_like(tensor).uniform_(low, high, generator=GENERATOR))
    return module


def error(a, b):
    return float((a - b).norm() / b.norm())


def test_parametrizations_are_merged_as_in_eval_mode():
    ffn = ChannelIdleFFN(8, 32)
    nn.utils.parametrizations.spectral_norm(ffn.fc1)
    with torch.no_grad():
        ffn.fc1.parametrizations.weight.original.normal_(generator=GENERATOR)
    ffn.train()
    x = torch.randn(2, 5, 8)
    expected = copy.deepcopy(ffn).eval()(x)
    assert error(reparameterize(ffn)(x), expected) < 1e-5
    assert ffn.training and ffn.fc1.training and ffn.fc1.parametrizations.weight.training
    assert error(ffn.eval()(x), expected) < 1e-6


def test_convolution_modules_that_compute_something_else_are_not_folded():
    mmcv = pytest.importorskip('mmcv.cnn')

    class Sum(mmcv.ConvModule):
        def forward(self, x):
            return self.activate(self.conv(x)) + self.norm(self.conv(x))

    def module(kind):
        return scrambled(kind(4, 4, 3, norm_cfg=dict(type='BN'))).eval()

    own, replaced, parametrized = module(Sum), module(mmcv.ConvModule), module(mmcv.ConvModule)
    replaced.forward = lambda x, m=replaced: m.norm(m.conv(x)) - m.conv(x)
    nn.utils.parametrizations.weight_norm(parametrized.conv)
    model = nn.Sequential(own, replaced, parametrized, nn.Flatten(2), ChannelIdleFFN(4, 16).eval())
    x = torch.randn(1, 4, 8, 8)
    before = model[:3](x)
    assert error(reparameterize_(model)[:3](x), before) < 1e-5


def test_random_activations_are_not_computed_twice():
    """The folded backward pass would draw other numbers than the forward pass."""
    ffn = scrambled(ChannelIdleFFN(8, 32, act_cfg=dict(type='RReLU', lower=0.0, upper=1.0)))
    ffn.double().train()
    x = torch.randn(2, 64, 8, dtype=torch.float64)

    def loss(x):
        torch.manual_seed(1)
        return ffn(x).square().sum()

    x.requires_grad_()
    direction = torch.randn(x.shape, generator=GENERATOR, dtype=x.dtype)
    slope = (torch.autograd.grad(loss(x), x)[0] * direction).sum()
    with torch.no_grad():
        step = 1e-6
        difference = (loss(x + step * direction) - loss(x - step * direction)) / (2 * step)
    assert float(slope) == pytest.approx(float(difference), rel=1e-5)


def test_what_is_merged_keeps_its_shortcut():
    ffn = scrambled(ChannelIdleFFN(8, 32)).eval()
    with torch.no_grad():
        ffn.fc2.weight.mul_(1e-3)
    outside = set_shortcut_(reparameterize(ffn), 'outside').bfloat16()
    again = reparameterize(outside)
    assert torch.equal(again.fc1.weight, outside.fc1.weight) and again.shortcut
    assert not set_shortcut_(outside.float(), 'inside').shortcut


def test_nested_inplace_activation():
    act = nn.Sequential(nn.ReLU(inplace=True))
    ffn = ChannelIdleFFN(8, 32, act_cfg=act).train()
    x = torch.randn(2, 64, 8, requires_grad=True)
    F.mse_loss(ffn(x), x.detach()).backward()
    assert x.grad is not None
