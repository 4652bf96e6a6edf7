"""BatchNorms of ConvModules, as necks and heads have them."""

import copy

import pytest
import torch
import torch.nn as nn
from mmcv.cnn import ConvModule

from repa_mm.faster import fuse_conv_bn_
from repa_mm.faster.fusing import Shift
from repa_mm.reparam import CheckpointError


class Sum(ConvModule):
    def forward(self, x):
        return self.activate(self.conv(x)) + self.norm(self.conv(x))


def conv(kind=ConvModule, norm='BN', **kwargs):
    return kind(8, 8, 3, **{'padding': 1, 'norm_cfg': dict(type=norm), **kwargs})


def shared():
    """As in MMDetection's RetinaSepBNHead."""
    first, second = conv(), conv()
    second.conv = first.conv
    return nn.Sequential(first, second)


class ByParts(nn.Module):
    """As in MMDetection's TOODHead: convolves by a weight, and calls the norm."""

    def __init__(self):
        super().__init__()
        self.module = conv()

    def forward(self, x):
        weight = 2 * self.module.conv.weight
        y = self.module.activate(self.module.norm(nn.functional.conv2d(x, weight, padding=1)))
        return y + self.module(x)


def replaced():
    module = conv()
    module.forward = lambda x, m=module: m.norm(m.conv(x)) - m.conv(x)
    return module


def parametrized():
    module = conv()
    nn.utils.parametrizations.weight_norm(module.conv)
    return module


MODULES = dict(
    ordinary=(conv, True), synchronized=(lambda: conv(norm='SyncBN'), True),
    group_norm=(lambda: conv(norm_cfg=dict(type='GN', num_groups=2)), False),
    with_bias=(lambda: conv(bias=True, padding_mode='reflect'), True),
    no_activation=(lambda: conv(act_cfg=None, norm_cfg=dict(type='BN', affine=False)), True),
    read_by_parts=(ByParts, True),
    norm_first=(lambda: conv(order=('norm', 'conv', 'act')), False),
    shared=(shared, False), own_forward=(lambda: conv(Sum), False), replaced=(replaced, False),
    parametrized=(parametrized, False),
)  # fmt: skip


@pytest.mark.parametrize('name', MODULES)
def test_what_is_fused_computes_the_same(name, randomize, relative_error):
    build, is_fused = MODULES[name]
    model = nn.Sequential(randomize(build())).eval()
    x = torch.randn(2, 8, 6, 6)
    expected = model(x)
    fused = fuse_conv_bn_(model if name == 'replaced' else copy.deepcopy(model))
    assert relative_error(fused(x), expected) < 1e-5
    assert any(type(m) is Shift for m in fused.modules()) == is_fused


def test_later_hooks_run(randomize, relative_error):
    stock = nn.Sequential(randomize(conv(bias=True))).eval()
    fused = fuse_conv_bn_(copy.deepcopy(stock))
    calls, x = [], torch.randn(2, 8, 6, 6)
    for name in ('conv', 'bn', 'activate'):
        fused[0].get_submodule(name).register_forward_hook(lambda *_: calls.append(1))
    assert relative_error(fused(x), stock(x)) < 1e-5 and len(calls) == 3


def test_weights_that_are_not_fused_are_refused(randomize):
    """A copy of the convolution and of the shift alone would be another model."""
    model = nn.Sequential(randomize(conv())).eval()
    weights, fused = copy.deepcopy(model.state_dict()), fuse_conv_bn_(model)
    with pytest.raises(CheckpointError, match=r"'0.bn' is fused .*: load it first"):
        fused.load_state_dict(weights, strict=False)
    fused.load_state_dict(fused.state_dict())


def test_weights_that_are_no_numbers_are_refused():
    broken = conv()
    broken.norm.running_var[0] = float('nan')
    with pytest.raises(ValueError, match='bn.running_var has values'):
        fuse_conv_bn_(broken)
