"""Differences of what the heads get."""

import math

import pytest
import torch

from repa_mm.apis.features import differences, relative_error


def test_the_largest_error_is_found_and_nan_is_not_lost():
    one, nan = torch.ones(2), torch.full((2,), torch.nan)
    assert relative_error([one, 3 * one, one], [one, 2 * one, one]) == 0.5
    for found in ([nan, one], [one, nan]):
        assert math.isnan(relative_error(found, [one, one]))


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
