"""The methods of others that fits are compared with, on random FFNs."""

import pytest
import torch
import torch.nn as nn

from benchmarks.methods import METHODS, Weights

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
