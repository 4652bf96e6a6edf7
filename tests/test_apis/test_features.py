"""Differences of what models compute."""

import copy
import math

import pytest
import torch
import torch.nn as nn

from repa_mm.apis.features import check_same, differences, relative_error
from repa_mm.export import noise
from repa_mm.io.configs import load_config
from repa_mm.io.paths import config_path
from tests.conftest import random_model


def test_the_largest_error_is_found():
    one = torch.ones(2)
    assert relative_error([one, 3 * one, one], [one, 2 * one, one]) == 0.5
    assert relative_error([0 * one], [0 * one]) == 0


ONE, NAN = torch.ones(2), torch.full((2,), torch.nan)


@pytest.mark.parametrize(
    'found, expected',
    [([NAN], [ONE]), ([ONE], [NAN]), ([NAN], [NAN]), ([ONE], [0 * ONE]), ([ONE], [torch.ones(1)]),
     ([ONE, ONE], [ONE]), ([], [])],
)  # fmt: skip
def test_what_cannot_be_compared_is_a_difference(found, expected):
    assert relative_error(found, expected) == math.inf


class Replaced(nn.Module):
    """A linear layer that computes something else."""

    def __init__(self, linear, factor):
        super().__init__()
        self.linear, self.factor = linear, factor

    def forward(self, x):
        return self.linear(x) * self.factor


@pytest.mark.parametrize('factor', [1.01, math.nan])
def test_the_module_that_differs_first_is_named(factor):
    expected = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    found = copy.deepcopy(expected)
    x = torch.randn(3, 4)
    how = dict(data=x, what='it', forward=lambda model, x: model(x))
    assert check_same(found, expected, **how) == 0
    found[1][0] = Replaced(found[1][0], factor)
    with pytest.raises(
        ValueError, match="^it .*; '1.0' differs first .Replaced, expected is Linear"
    ):
        check_same(found, expected, **how)
    found[1][0].factor = 1 + 1e-4
    assert 0 < check_same(found, expected, **how) < 1e-3


@pytest.mark.parametrize(
    'name, part',
    [('retinanet_repa_swin_digits', 'bbox_head.retina_cls'),
     ('mask_rcnn_repa_swin_digits', 'rpn_head.rpn_reg'),
     ('upernet_repa_swin_digits', 'decode_head.conv_seg'),
     ('dino_detr_swin_digits', 'encoder.layers.1.norms.1')],
)  # fmt: skip
def test_heads_and_encoders_are_compared(name, part):
    model = random_model(load_config(config_path(f'demo/{name}.py')))
    data = noise(model.cfg)[0]
    other = copy.deepcopy(model)
    assert check_same(other, model, data, 'it') == 0
    other.get_submodule(part).bias.data.add_(0.5)
    with pytest.raises(ValueError, match=f'^it computes .*; {part!r} differs first'):
        check_same(other, model, data, 'it')


SHAPES = [((5, 7, 6), (0, 1)), ((5, 6, 4, 3), (0, 2, 3)), ((5, 6, 7), (0, 2)), ((5, 6), (0,))]


@pytest.mark.parametrize('shape, dims', SHAPES)
def test_differences_are_shares_of_the_variance_of_channels(shape, dims):
    before = torch.randn(shape)
    before += 3 * torch.randn([1 if i in dims else n for i, n in enumerate(shape)])
    after = before + 0.1 * torch.randn(shape)
    (found,) = differences([[before[:2]], [before[2:]]], [[after[:2]], [after[2:]]])
    variance = before.var(dims, correction=0).mean()
    assert found == pytest.approx(float((before - after).square().mean() / variance), rel=1e-3)
    vector = before[:1].flatten(1)  # has no variance: the change is relative to its mean square
    assert differences([[vector]], [[1.1 * vector]]) == pytest.approx([0.01])
