"""Modules that can be traced for images of any size compute what the stock modules do."""

import torch

from repa_mm.faster.any_size import AveragePool


def test_average_pool_is_the_adaptive_one():
    x = torch.randn(2, 3, 13, 22, dtype=torch.float64)
    for size in [(1, 1), (2, 2), (3, 5), (6, 6), (13, 22)]:
        expected = torch.nn.AdaptiveAvgPool2d(size)(x)
        torch.testing.assert_close(AveragePool(size)(x), expected)
