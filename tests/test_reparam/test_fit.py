"""The closed-form fit of one FFN, against plain least squares."""

import numpy as np
import pytest
import torch
import torch.nn as nn

from repa_mm.reparam import ChannelIdleFFN
from repa_mm.reparam.ffn import fit as fitting
from repa_mm.reparam.ffn.fit import (
    Moments,
    channel_idle_ffn,
    eliminate,
    ffn_moments,
    fit_ffn,
    norm_as_batch_norm,
)

DIMS, HIDDEN = 6, 24


@pytest.fixture
def ffn(randomize):
    ffn = ChannelIdleFFN(DIMS, HIDDEN, 0.0, norm_cfg=dict(type='LN'), layer_scale_init_value=1.0)
    return randomize(ffn).double().eval()


def tokens(n=2000):
    mixing = torch.randn(DIMS, DIMS, dtype=torch.float64)
    return torch.randn(n, DIMS, dtype=torch.float64) @ mixing + 0.5


def hidden(ffn, x):
    u = ffn.norm1(x)
    return u, ffn.act(ffn.fc1(u))


def lstsq(features, t):
    """The least-squares prediction, by numpy."""
    features = np.concatenate([np.asarray(f) for f in features] + [np.ones((len(t), 1))], axis=1)
    return features @ np.linalg.lstsq(features, t.numpy(), rcond=None)[0]


def test_moments_are_those_of_all_rows():
    rows = torch.randn(100, 5, dtype=torch.float64) * torch.tensor([1, 2, 3, 4, 1e-3]) + 1e4
    moments = Moments()
    for part in rows.split(30):
        moments.add(part[:, :2], part[:, 2:])
    mean, cov = moments.mean_and_covariance()
    assert moments.count == 100
    torch.testing.assert_close(mean, rows.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(cov, torch.cov(rows.t(), correction=0), rtol=1e-9, atol=0)


@torch.no_grad()
@pytest.mark.parametrize('select', ['score', 'eliminate'])
@pytest.mark.parametrize('num_active', [0, 1, 6, 12, 18])
def test_it_is_the_regression_on_the_chosen_channels(ffn, select, num_active):
    x = tokens()
    y = ffn(x) + 0.1 * torch.randn_like(x)
    fit = fit_ffn(ffn, ffn_moments(ffn, x, y), num_active, select, ridge=1e-12)
    u, a = hidden(ffn, x)
    expected = lstsq([u, a[:, fit.active]], y - x)
    form = channel_idle_ffn(ffn, fit, len(x))
    assert (form.num_active, form.num_idle) == (num_active, HIDDEN - num_active)
    np.testing.assert_allclose((form(x) - x).numpy(), expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose((form.merge()(x) - x).numpy(), expected, rtol=0, atol=1e-6)
    left = (y - form(x)).var(0, correction=0).sum() / (y - x).var(0, correction=0).sum()
    assert fit.unexplained == pytest.approx(left.item(), abs=1e-9)
    assert fit.shortfall == pytest.approx(0, abs=1e-9)
    alone = torch.from_numpy(lstsq([u], y - x))
    left = (y - x - alone).var(0, correction=0).sum() / (y - x).var(0, correction=0).sum()
    assert fit.unexplained_affine == pytest.approx(left.item(), abs=1e-9)


@torch.no_grad()
def test_fewer_idle_channels_than_the_linear_path_needs(ffn):
    """Then the regression is on what the idle channels can give."""
    x = tokens()
    y = ffn(x) + 0.1 * torch.randn_like(x)
    fit = fit_ffn(ffn, ffn_moments(ffn, x, y), HIDDEN - 3, ridge=1e-12)
    u, a = hidden(ffn, x)
    h = ffn.fc1(u)
    form = channel_idle_ffn(ffn, fit, len(x))
    expected = lstsq([h[:, fit.idle], a[:, fit.active]], y - x)
    np.testing.assert_allclose((form(x) - x).numpy(), expected, rtol=0, atol=1e-6)
    assert torch.allclose(form.merge()(x), form(x), atol=1e-12)
    assert fit.shortfall > 1e-6
    best = torch.from_numpy(lstsq([u, a[:, fit.active]], y - x))
    gap = (expected - best.numpy()).var(0).sum() / (y - x).numpy().var(0).sum()
    assert fit.shortfall == pytest.approx(gap, rel=1e-4)
