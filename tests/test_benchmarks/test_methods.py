"""The methods of others that fits are compared with, on random FFNs."""

import numpy as np
import pytest
import torch
import torch.nn as nn

from benchmarks.methods import METHODS, Weights, shared_widths

DIMS, WIDTH, TOKENS = 12, 48, 5000
COMPENSATING = [name for name in METHODS if name not in ('magnitude', 'linear map')]


@pytest.fixture
def ffn():
    def draw(*shape):
        return torch.randn(*shape) / shape[-1] ** 0.5

    zero = torch.zeros(DIMS, DIMS)
    weights = zero, draw(DIMS), draw(WIDTH, DIMS), 0.3 * torch.randn(WIDTH), draw(DIMS, WIDTH)
    return Weights(*(w.double() for w in weights), nn.GELU())


@pytest.fixture
def u():
    return torch.randn(TOKENS, DIMS)


def compute(ffn, u, act):
    u = u.double()
    w, b, w_in, b_in, w_out = (x.double() for x in ffn[:5])
    return u @ w.t() + b + act(u @ w_in.t() + b_in) @ w_out.t()


def convert(name, ffn, u, width):
    out = compute(ffn, u, ffn.act)
    fitted = METHODS[name](ffn, u, out, width)
    assert all(x.dtype == torch.float64 and x.isfinite().all() for x in fitted)
    return fitted, (compute(fitted, u, ffn.act) - out).square().mean()


@pytest.mark.parametrize('name', COMPENSATING)
def test_all_channels_reproduce_the_ffn(name, ffn, u, relative_error):
    fitted, _ = convert(name, ffn, u, WIDTH)
    assert relative_error(compute(fitted, u, ffn.act), compute(ffn, u, ffn.act)) < 1e-10


@pytest.mark.parametrize('name', COMPENSATING)
def test_compensation_lowers_the_error(name, ffn, u):
    fitted, error = convert(name, ffn, u, WIDTH // 2)
    assert fitted.w_in.shape == (WIDTH // 2, DIMS) and not fitted.w.any()
    kept = (ffn.w_in[None].double() == fitted.w_in[:, None]).all(2).nonzero()[:, 1]
    plain = fitted._replace(w_out=ffn.w_out.double()[:, kept], b=ffn.b.double())
    out = compute(ffn, u, ffn.act)
    assert error < (compute(plain, u, ffn.act) - out).square().mean()


def test_linear_map_is_least_squares(ffn, u, relative_error):
    fitted, error = convert('linear map', ffn, u, 0)
    ones = np.ones((TOKENS, 1))
    out = compute(ffn, u, ffn.act).numpy()
    expected, *_ = np.linalg.lstsq(np.hstack([u.double().numpy(), ones]), out, rcond=None)
    assert relative_error(fitted.w, torch.from_numpy(expected[:-1].T)) < 1e-9
    assert relative_error(fitted.b, torch.from_numpy(expected[-1])) < 1e-9
    assert len(fitted.w_in) == 0


def test_magnitude_keeps_the_largest_weights(ffn, u):
    fitted, _ = convert('magnitude', ffn, u, WIDTH // 2)
    norms = ffn.w_in.norm(dim=1) * ffn.w_out.norm(dim=0)
    kept = norms.topk(WIDTH // 2).indices.sort().values
    assert torch.equal(fitted.w_in, ffn.w_in[kept].double())
    assert torch.equal(fitted.w_out, ffn.w_out[:, kept].double())


def test_shared_widths():
    scores = [torch.tensor([1.0, 2, 3, 4]), torch.tensor([10.0, 0, 20, 30])]
    assert shared_widths(scores, [1, 1], 5) == [2, 3]
    assert shared_widths(scores, [1, 1], 2) == [1, 1]
    assert shared_widths(scores, [1, 3], 12) == [3, 3]
