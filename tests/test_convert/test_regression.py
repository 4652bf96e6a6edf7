"""The fit of one FFN, against plain least squares."""

import numpy as np
import pytest
import torch

from repa_mm.convert import regression
from repa_mm.convert.regression import (
    RIDGES,
    FittedFFN,
    Moments,
    Problem,
    cross_validated,
    ffn_moments,
    fit_ffn,
    joined,
    refine,
    with_foreign_tokens,
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


def moments(ffn, x, y, number=4):
    u = ffn.norm1(x).tensor_split(number)
    return ffn_moments(FittedFFN.from_form(ffn), list(zip(u, (y - x).tensor_split(number))))


def test_moments_are_those_of_all_rows():
    rows = torch.randn(100, 5, dtype=torch.float64) * torch.tensor([1, 2, 3, 4, 1e-3]) + 1e4
    moments = [Moments(rows[0]) for _ in range(2)]
    for i, part in enumerate(rows.split(30)):
        moments[i % 2].add(part)
    mean, cov = Moments.pooled(moments).mean_and_covariance()
    torch.testing.assert_close(mean, rows.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(cov, torch.cov(rows.t(), correction=0), rtol=1e-9, atol=0)


@torch.no_grad()
@pytest.mark.parametrize('width', [1, 12, 24])
def test_it_is_the_regression_on_the_kept_channels(ffn, width, unridged):
    x = tokens()
    y = ffn(x) + 0.1 * torch.randn_like(x)
    fit = fit_ffn(FittedFFN.from_form(ffn), moments(ffn, x, y), width)
    u = ffn.norm1(x)
    features = ffn.act(u @ fit.w_in.t() + fit.b_in)
    features = torch.cat([features, torch.ones(len(x), 1, dtype=x.dtype)], dim=1).numpy()
    expected = features @ np.linalg.lstsq(features, (y - x).numpy(), rcond=None)[0]
    np.testing.assert_allclose(fit(u).numpy(), expected, rtol=0, atol=1e-6)
    left = (y - x - fit(u)).var(0, correction=0).sum() / (y - x).var(0, correction=0).sum()
    assert fit.unexplained(u, y - x) == pytest.approx(left.item(), abs=1e-9)
    rows = {tuple(row) for row in ffn.fc1.weight.tolist()}
    assert all(tuple(row) in rows for row in fit.w_in.tolist())


@torch.no_grad()
@pytest.mark.parametrize('width, number', [(HIDDEN, 200), (12, 1)])
def test_all_channels_or_constant_tokens_are_fitted_exactly(ffn, width, number):
    x = tokens(number).expand(200, -1)
    u, y = ffn.norm1(x), ffn(x)
    fit = fit_ffn(FittedFFN.from_form(ffn), moments(ffn, x, y), width)
    torch.testing.assert_close(x + fit(u), y)
    if number == 1:
        torch.testing.assert_close(x + refine(fit, u, y - x)(u), y)


@torch.no_grad()
@pytest.mark.parametrize('protected', [0, 3])
def test_elimination_is_that_of_refitting_from_scratch(protected, unridged):
    rows = torch.randn(300, 11, dtype=torch.float64)
    rows[:, 3] += rows[:, 5]
    rows -= rows.mean(0)
    features, t = rows.split([8, 3], 1)
    moments, kept = Moments(rows[0]), list(range(8))
    moments.add(rows)
    problem = Problem(torch.zeros(3, 8, dtype=torch.float64), moments)

    def error(columns):
        chosen = features[:, list(columns)]
        return (t - chosen @ torch.linalg.lstsq(chosen, t).solution).square().sum()

    for found in problem.eliminate(*range(7, protected, -1), protected=protected):
        others = [[k for k in kept if k != gone] for gone in kept[protected:]]
        kept = min(others, key=error)
        assert found.tolist() == kept
    # Several at a time, by what the removal of each alone costs.
    costs = {gone: error({*range(8)} - {gone}) for gone in range(protected, 8)}
    gone = sorted(costs, key=costs.get)[:3]
    (found,) = problem.eliminate(5, step=0.7, protected=protected)
    assert found.tolist() == [k for k in range(8) if k not in gone]


@torch.no_grad()
def test_the_ridge_is_chosen_by_images_that_the_fit_has_not_seen(ffn):
    many = tokens(4000)
    few, y = many[:40], ffn(many) + 0.3 * torch.randn_like(many)
    whole, parts = FittedFFN.from_form(ffn), moments(ffn, few, y[:40])
    problem = Problem(whole.w_out, Moments.pooled(parts))
    (kept,) = problem.eliminate(12)
    errors = {}
    for ridge in RIDGES:
        fit = problem.fit(whole, kept, ridge)
        errors[ridge] = (y - many - fit(ffn.norm1(many))).square().sum().item()
    chosen = errors[cross_validated(whole.w_out, parts, kept)]
    assert chosen < 1.2 * min(errors.values()) and chosen < max(errors.values())
    # One batch cannot be left out.
    assert cross_validated(whole.w_out, parts[:1], kept) == RIDGES[0]


def test_input_weights_move_to_where_the_error_is_less(ffn, monkeypatch):
    monkeypatch.setattr(regression, 'STEPS', 200)
    x = tokens()
    ffn.layer_scale.data[1] = 1e-6  # and a row of small output weights does not run away
    with torch.no_grad():
        u, t = ffn.norm1(x), ffn(x) - x
        fit = fit_ffn(FittedFFN.from_form(ffn), moments(ffn, x, x + t), 4)
        found = refine(fit, u, t)
        assert found.unexplained(u, t) < 0.8 * fit.unexplained(u, t)
    assert not any(weight.requires_grad for weight in found[:4])
    assert found(u)[:, 1].abs().max() < 1e-4
    assert torch.equal(refine(fit, u, t).w_in, found.w_in)


@torch.no_grad()
def test_targets_of_foreign_tokens(ffn):
    """They are what the pretrained FFN makes of them, and what the block is to make up for."""
    x = tokens(7)
    u, lost = ffn.norm1(x), torch.randn(DIMS, dtype=torch.float64)
    more, targets = with_foreign_tokens(FittedFFN.from_form(ffn), u, ffn(x) - x + lost)
    assert len(more) == len(targets) == 10 and torch.equal(more[:7], u)
    assert all((more[7:, None] - u).abs().amax(-1).min(1).values > 1e-6)
    hidden = ffn.act(more @ ffn.fc1.weight.t() + ffn.fc1.bias)
    expected = (hidden @ ffn.fc2.weight.t() + ffn.fc2.bias) * ffn.layer_scale
    torch.testing.assert_close(targets, expected + lost)


@torch.no_grad()
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('number', [16, 1000])  # fewer tokens than channels, and more
def test_channels_that_hardly_vary_get_no_large_weights(ffn, number, dtype, monkeypatch):
    """What the blocks before have lost varies, and no channel that could make up for it."""
    monkeypatch.setattr(regression, 'STEPS', 50)
    whole = FittedFFN.from_form(ffn)
    base, mixing = torch.randn(DIMS), torch.randn(DIMS, DIMS)
    for size in (1e-2, 1e-3, 1e-6, 0.0):
        moved = torch.randn(number, DIMS)
        u = (base + size * moved).to(dtype)
        t = whole(u.float()) + 0.1 * torch.tanh(moved @ mixing)
        parts = [with_foreign_tokens(whole, *part) for part in zip(u.chunk(4), t.chunk(4))]
        fit = refine(fit_ffn(whole, ffn_moments(whole, parts), 12), *joined(parts))
        for name, w in fit.weights.items():
            assert w.isfinite().all() and w.abs().max() < 6 * whole.weights[name].abs().max(), name
        assert fit(u).dtype == dtype


@torch.no_grad()
def test_steps_never_lead_away_from_a_fit_with_hardly_an_error(ffn):
    whole = FittedFFN.from_form(ffn)
    u = torch.randn(DIMS) + 1e-3 * torch.randn(1000, DIMS)
    t = whole(u)
    fit = fit_ffn(whole, ffn_moments(whole, [(u, t)]), 12)
    assert refine(fit, u, t).unexplained(u, t) <= fit.unexplained(u, t) < 0.1


@torch.no_grad()
def test_half_precision_rounds_the_tokens_alone(ffn):
    """The channels vary by less than their rounding in bfloat16, and are fitted all the same."""
    whole = FittedFFN.from_form(ffn)
    u = (1 + torch.randn(1000, DIMS) / 50).bfloat16()
    t = whole(u.float())
    fits = [
        fit_ffn(whole, ffn_moments(whole, list(zip(x.chunk(4), t.chunk(4)))), 12)
        for x in (u, u.float())
    ]
    assert torch.equal(fits[0].w_out, fits[1].w_out)
