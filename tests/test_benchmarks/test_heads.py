"""Published methods for narrower heads: exact with all dimensions, and what each one minimizes."""

import torch

from benchmarks.heads import METHODS
from repa_mm.convert.heads import Tokens
from tests.test_convert.test_heads import weights


@torch.no_grad()
def test_methods():
    torch.manual_seed(0)
    x = torch.randn(40, 9, 10, dtype=torch.float64) @ torch.randn(10, 10, dtype=torch.float64)
    heads, tokens = weights(), Tokens(x, x)
    left = {}
    for name, method in METHODS.items():
        moments = method(heads, 2, 0.4, [tokens])
        assert abs(moments.fit(6, 6)[1]) < 1e-9, name
        left[name] = moments.fit(3, 6)[1]
    assert left['ours'] < left['CORP'] < left['dimensions']
    assert left['ours'] < left['CLOVER']
