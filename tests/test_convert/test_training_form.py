"""The fit of one channel-idle FFN, against plain least squares and against its own forms."""

import copy

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from repa_mm.apis.features import differences
from repa_mm.convert import convert_pretrained, regression
from repa_mm.convert.regression import FittedFFN, joined
from repa_mm.convert.training_form import fit_idle, fit_training_form
from repa_mm.models import add_structures_
from repa_mm.models.sites import raised
from repa_mm.reparam import (
    ChannelIdleFFN,
    CheckpointError,
    FFNParts,
    TrainingForm,
    copy_matrix_,
    outermost,
    reparameterize,
)
from tests.test_convert.test_conversion import VIT, images, outputs, pretrained
from tests.test_convert.test_regression import DIMS, HIDDEN, tokens

LN = dict(type='LN')


def ordinary(randomize, **kwargs):
    return randomize(ChannelIdleFFN(DIMS, HIDDEN, 0.0, **{'norm_cfg': LN, **kwargs})).eval()


def of(ffn, idle_ratio):
    """A channel-idle FFN that an ordinary one fills."""
    act_cfg = dict(type=type(ffn.act))
    form = ChannelIdleFFN(DIMS, HIDDEN, idle_ratio, act_cfg, ffn.norm_cfg).to(ffn.fc1.weight)
    if ffn.layer_scale is not None:
        form.layer_scale = torch.nn.Parameter(torch.ones_like(ffn.layer_scale))
    form.fill(FFNParts(ffn.norm1, ffn.fc1, ffn.act, ffn.fc2, ffn.layer_scale))
    return form.eval()


def fitted(ffn, parts, idle_ratio):
    """A channel-idle FFN that is fitted to an ordinary one, and what it should compute."""
    form = of(ffn, idle_ratio)
    fit, (w_in, b_in, w_out, b_out) = fit_training_form(
        FittedFFN.from_form(ffn), parts, form.num_active
    )
    if ffn.layer_scale is not None:
        scale = raised(ffn.layer_scale, ffn.fc2.weight, w_out)
        form.layer_scale.copy_(scale)
        w_out, b_out = w_out / scale[:, None], b_out / scale
    copy_matrix_(form.fc1, w_in, b_in)
    copy_matrix_(form.fc2, w_out, b_out)
    return form, fit


@torch.no_grad()
def sample(ffn, n=2000, noise=0.0, number=4):
    """Tokens (N, C), and their parts (u, t)."""
    x = tokens(n).to(ffn.fc1.weight)
    u, t = ffn.norm1(x), ffn(x) - x
    t = t + noise * torch.randn_like(t)
    return x, list(zip(u.tensor_split(number), t.tensor_split(number)))


@torch.no_grad()
@pytest.mark.parametrize('num_active', [0, 6])
def test_it_is_the_regression_with_the_tokens_themselves(randomize, unridged, num_active):
    ffn = ordinary(randomize).double()
    _, parts = sample(ffn, noise=0.1)
    narrow = FittedFFN.from_form(ffn)
    fit, active, _ = fit_idle(narrow, parts, num_active)
    u, t = (torch.cat(columns) for columns in zip(*parts))
    features = [torch.ones(len(u), 1).to(u), u, narrow.features(u)[:, active]]
    features = torch.cat(features, 1).numpy()
    expected = features @ np.linalg.lstsq(features, t.numpy(), rcond=1e-12)[0]
    assert len(active) == num_active
    np.testing.assert_allclose(fit(u).numpy(), expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_ridge_draws_to_linear_idle_channels(randomize, monkeypatch):
    monkeypatch.setattr(regression, 'RIDGES', (1e12,))
    ffn = ordinary(randomize).double()
    _, parts = sample(ffn)
    narrow = FittedFFN.from_form(ffn)
    fit, active, slopes = fit_idle(narrow, parts, 6)
    idle = [j for j in range(HIDDEN) if j not in active]
    assert_close(fit.w_out, narrow.w_out[:, active])
    expected = (narrow.w_out * slopes)[:, idle] @ narrow.w_in[idle]
    assert_close(fit.linear, expected)
    # By Stein's lemma, for nearly normal channels: between 0 and 1 for a GELU.
    assert 0.1 < slopes.mean() < 0.9


CASES = {
    'LayerNorm': dict(),
    'ReLU': dict(act_cfg=dict(type='ReLU')),
    'post-norm': dict(norm_cfg=None, act_cfg=dict(type='ReLU')),
    'layer scale': dict(layer_scale_init_value=1.0),
}


@torch.no_grad()
@pytest.mark.parametrize('idle_ratio', [0.25, 0.75, 1.0])
@pytest.mark.parametrize('case', CASES)
def test_the_form_computes_what_was_fitted_and_merges_exactly(randomize, case, idle_ratio):
    ffn = ordinary(randomize, **CASES[case])
    x, parts = sample(ffn)
    (form, fit), filled = fitted(ffn, parts, idle_ratio), of(ffn, idle_ratio)
    expected = x + fit(ffn.norm1(x))
    y = form(x[None])
    assert_close(y[0], expected, rtol=1e-4, atol=1e-4)
    assert_close(reparameterize(form)(x[None]), y, rtol=1e-4, atol=1e-4)
    z = ffn(x) - x
    unexplained = float((y[0] - ffn(x)).square().sum() / (z - z.mean(0)).square().sum())
    assert unexplained == pytest.approx(fit.unexplained(*joined(parts)), rel=0.01, abs=1e-6)
    start = float((filled(x[None])[0] - ffn(x)).square().sum() / (z - z.mean(0)).square().sum())
    assert unexplained < start / 3
    assert form.fc2.weight.abs().max() < 10 * ffn.fc2.weight.abs().max()


@torch.no_grad()
@pytest.mark.parametrize('case', ['few tokens', 'dead channels', 'one token', 'no scale'])
def test_ill_conditioned_fits_stay_near_the_pretrained_weights(randomize, case):
    ffn = ordinary(randomize, act_cfg=dict(type='ReLU'), layer_scale_init_value=1.0)
    if case == 'dead channels':
        ffn.fc1.weight[:20], ffn.fc1.bias[:20] = 0, -1
    if case == 'no scale':
        ffn.layer_scale[:2] = torch.tensor([0.0, 1e-6])
    x, parts = sample(ffn, {'few tokens': 12, 'one token': 4}.get(case, 2000))
    if case == 'one token':
        parts = [(u[:1].expand(8, -1), t[:1].expand(8, -1)) for u, t in parts[:1] * 4]
    form, _ = fitted(ffn, parts, 0.75)
    y = form(x[None])
    assert_close(reparameterize(form)(x[None]), y, rtol=1e-4, atol=1e-4)
    for name in ('fc1', 'fc2'):
        weight = getattr(form, name).weight
        assert weight.isfinite().all()
        assert weight.abs().max() < 10 * getattr(ffn, name).weight.abs().max()
    assert y.isfinite().all()


@pytest.mark.parametrize('case', ['Swin', 'MLP-Mixer', 'PoolFormer', VIT])
def test_a_model_starts_nearer_than_one_that_is_filled(case, randomize):
    model, number = pretrained(case, randomize)
    x = torch.randn(1, 3, 64, 64)
    structure = dict(type='ChannelIdle', idle_ratio=0.75, norm_cfg=dict(type='keep'))
    filled = add_structures_(copy.deepcopy(model), [structure])
    kwargs = dict(idle_ratio=0.75, forward=outputs, held_out=[x])
    fitted, report = convert_pretrained(model, images(2), **kwargs)
    active = [form.num_active for _, form in outermost(fitted, TrainingForm)]
    assert len(active) == number and active == [row.after[0] for row in report.blocks]
    with torch.no_grad():
        expected = [outputs(model, x)]
        starts = [differences(expected, [outputs(m, x)]) for m in (fitted, filled)]
        merged = differences([outputs(fitted, x)], [outputs(reparameterize(fitted), x)])
    assert max(report.differences) == pytest.approx(max(starts[0]), rel=0.1)
    assert sum(starts[0]) < sum(starts[1]) / 3
    assert max(merged) < 1e-6
    with pytest.raises(CheckpointError):  # not those of its forms
        fitted.load_state_dict(model.state_dict(), strict=False)
