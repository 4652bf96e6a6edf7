"""Differences of what the heads get."""

import math

import torch

from repa_mm.apis.features import relative_error


def test_the_largest_error_is_found_and_nan_is_not_lost():
    one, nan = torch.ones(2), torch.full((2,), torch.nan)
    assert relative_error([one, 3 * one, one], [one, 2 * one, one]) == 0.5
    for found in ([nan, one], [one, nan]):
        assert math.isnan(relative_error(found, [one, one]))
