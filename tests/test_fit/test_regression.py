"""The closed-form fit of one FFN, against plain least squares."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn as nn

from repa_mm.fit.regression import (
    Moments,
    channel_idle_ffn,
    eliminate,
    elimination_path,
    ffn_moments,
    fit_ffn,
    norm_as_batch_norm,
    share_active_channels,
)
from repa_mm.reparam import ChannelIdleFFN

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


@pytest.mark.parametrize('norm', ['LN', 'BN'])
@pytest.mark.parametrize('decades', [1, 4, 9])
def test_idle_rows_that_are_almost_dependent(norm, decades, ffn):
    """The training form is as exact, and no weights in it are large and cancel."""
    x = tokens()
    with torch.no_grad():
        u, _, v = torch.linalg.svd(ffn.fc1.weight, full_matrices=False)
        ffn.fc1.weight.copy_(u * torch.logspace(0, -decades, DIMS, dtype=u.dtype) @ v)
        t = ffn(x) - x
        if norm == 'BN':
            ffn = norm_as_batch_norm(ffn, x, ffn.norm1(x), 1e-3)
        fit = fit_ffn(ffn, ffn_moments(ffn, ffn.norm1(x), t), 6, ridge=1e-3)
        form = channel_idle_ffn(ffn, fit, len(x)).eval()
        left = (form(x) - x - t).square().mean() / t.var(0, unbiased=False).mean()
        assert left.item() == pytest.approx(fit.unexplained, rel=1e-4) and fit.shortfall == 0
        w = fit.idle_out @ fit.idle_in
        sizes = [matrix.norm() for matrix in (fit.idle_out, fit.idle_in, w)]
        assert sizes[0] * sizes[1] < 300 * sizes[2]
        kept = torch.equal(fit.idle_in, ffn.fc1.weight[fit.idle])
        assert norm == 'BN' or kept == (decades == 1)
        found, expected = form.merge()(x) - x, form(x) - x
        assert (found - expected).abs().max() < 1e-9 * expected.abs().max()


def test_moments_are_those_of_all_rows():
    rows = torch.randn(100, 5, dtype=torch.float64) * torch.tensor([1, 2, 3, 4, 1e-3]) + 1e4
    moments = [Moments(rows[0]) for _ in range(2)]
    for i, part in enumerate(rows.split(30)):
        moments[i % 2].add(part)
    moments = Moments.of(moments)
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
    fit = fit_ffn(ffn, ffn_moments(ffn, ffn.norm1(x), y - x), num_active, select, ridge=1e-12)
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
    fit = fit_ffn(ffn, ffn_moments(ffn, ffn.norm1(x), y - x), HIDDEN - 3, ridge=1e-12)
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


@torch.no_grad()
def test_elimination_is_that_of_refitting_from_scratch():
    features, t = torch.randn(300, 8, dtype=torch.float64), torch.randn(300, 3, dtype=torch.float64)
    features[:, 3] += features[:, 5]
    kept = list(range(8))

    def error(columns):
        chosen = features[:, list(columns)]
        return (t - chosen @ torch.linalg.lstsq(chosen, t).solution).square().sum()

    gram, full = features.t() @ features, torch.linalg.lstsq(features, t).solution.t()
    for number in range(7, 0, -1):
        kept = min(([k for k in kept if k != gone] for gone in kept), key=error)
        indices, weights, path = eliminate(gram, full, number)
        assert indices.tolist() == kept
        assert [n for n, _ in path] == list(range(8, number - 1, -1))
        assert path[-1][1] == pytest.approx((error(kept) - error(range(8))).item())
        expected = torch.linalg.lstsq(features[:, kept], t).solution.t()
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)
    # Several at a time: the solution is still that of what is kept.
    indices, weights, _ = eliminate(gram, full, 3, step=0.4)
    expected = torch.linalg.lstsq(features[:, indices], t).solution.t()
    torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize('norm', ['keep', 'fold'])
def test_few_tokens_are_not_worse_than_the_affine_solution(ffn, norm):
    """The ridge is chosen by tokens that the fit has not seen."""
    many = tokens(4000)
    few, y = many[:16], ffn(many)

    def left(form):
        return (y - form(many)).square().sum() / (y - many).square().sum()

    def fitted(ridge):
        given, u = ffn, ffn.norm1(few)
        if norm == 'fold':
            given = norm_as_batch_norm(ffn, few, u, ridge)
            u = given.norm1(few)
        fit = fit_ffn(given, ffn_moments(given, u, y[:16] - few), 6, ridge=ridge)
        return left(channel_idle_ffn(given, fit, 16))

    assert fitted(None) < 1.5 * fitted(1000.0)
    assert fitted(None) < fitted(1e-9)


@torch.no_grad()
def test_a_norm_that_is_an_affine_map_is_folded_exactly(ffn):
    x = tokens()
    u = x @ torch.randn(DIMS, DIMS, dtype=torch.float64) + 1
    new = norm_as_batch_norm(ffn, x, u, ridge=1e-12)
    torch.testing.assert_close(new.fc1(new.norm1(x)), ffn.fc1(u), rtol=0, atol=1e-6)
    assert isinstance(new.norm1, nn.BatchNorm1d) and isinstance(ffn.norm1, nn.LayerNorm)
    fit = fit_ffn(new, ffn_moments(new, new.norm1(x), ffn(x) - x), 12)
    form = channel_idle_ffn(new, fit, len(x))
    # In training mode the second BatchNorm sees the statistics that it has.
    before = form(x)
    form.train()
    torch.testing.assert_close(form.forward_literal(x), before, rtol=0, atol=1e-2)


@torch.no_grad()
def test_scales_next_to_zero_and_constant_tokens(ffn):
    x = tokens()
    ffn.layer_scale[2:] = 0
    y = ffn(x) + 0.5 * x
    fit = fit_ffn(ffn, ffn_moments(ffn, ffn.norm1(x), y - x), 12)
    form = channel_idle_ffn(ffn, fit, len(x))
    assert (form(x) - y).var(0).sum() < 0.05 * y.var(0).sum()
    assert form.fc2.weight.abs().max() < 1e4
    x = x[:1].expand(50, -1)
    fit = fit_ffn(ffn, ffn_moments(ffn, ffn.norm1(x), ffn(x) - x), 12)
    torch.testing.assert_close(channel_idle_ffn(ffn, fit, 50)(x), ffn(x))


def test_what_is_not_a_number(ffn):
    x = tokens(20)
    x[3, 2] = torch.nan
    with torch.no_grad(), pytest.raises(ValueError, match='not finite'):
        fit_ffn(ffn, ffn_moments(ffn, ffn.norm1(x), x), 3)
    with torch.no_grad(), pytest.raises(ValueError, match="'score' or 'eliminate'.*'first'"):
        fit_ffn(ffn, ffn_moments(ffn, ffn.norm1(x), x), 3, select='first')


def test_one_budget_for_several_ffns():
    """The least error of all numbers of active channels that the budget allows."""
    paths = [[(n, scale * (8 - n) ** 2) for n in range(8, -1, -1)] for scale in (1.0, 4.0, 0.2)]
    weights, costs, most, budget = [1.0, 1.0, 2.0], [1.0, 2.0, 1.0], [8, 6, 8], 16.0
    counts = share_active_channels(paths, weights, costs, most, budget)

    def error(counts):
        return sum(w * dict(path)[n] for w, path, n in zip(weights, paths, counts))

    def cost(counts):
        return sum(n * c for n, c in zip(counts, costs))

    assert cost(counts) <= budget
    allowed = itertools.product(range(9), range(7), range(9))
    same = [c for c in allowed if cost(c) <= cost(counts)]
    assert error(counts) == min(error(c) for c in same)
    assert cost(counts) > budget - 4


@torch.no_grad()
def test_the_path_ends_at_the_affine_solution(ffn):
    x = tokens()
    parts = ffn_moments(ffn, ffn.norm1(x), ffn(x) - x)
    path = elimination_path(ffn, parts)
    assert path[0] == (HIDDEN, 0.0) and path[-1][0] == 0
    errors = [error for _, error in path]
    assert errors == sorted(errors)
    variance = (ffn(x) - x).var(0).sum().item()
    affine = fit_ffn(ffn, parts, 0).unexplained
    assert path[-1][1] / variance == pytest.approx(affine, rel=0.5)
