"""Steps that are a share of each parameter's size."""

import pytest
import torch

from repa_mm.engine import RelativeAdamW


@pytest.mark.parametrize('with_closure', [False, True])
def test_steps_are_relative(with_closure):
    values = (100.0, 99.0), (1e-3, 0.99e-3), (0.0, -1e-6)  # zero moves by the floor
    params = [torch.nn.Parameter(torch.full((3,), value)) for value, _ in values]
    optimizer = RelativeAdamW(params, lr=0.01, weight_decay=0.0)

    def loss():
        total = sum(p.sum() for p in params)
        total.backward()
        return total

    if with_closure:
        assert optimizer.step(loss).item() == pytest.approx(300.003)
    else:
        loss()
        optimizer.step()
    for param, (_, expected) in zip(params, values):
        torch.testing.assert_close(param.data, torch.full((3,), expected), rtol=1e-4, atol=0)
