"""Progressive norms against their equations, and merged."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from projects.schedules import set_lam_
from projects.slab import NormedLinear, ProgressiveNorm
from repa_mm.reparam import finish_schedules_


@pytest.fixture
def scattered(randomize):
    """Every parameter and statistic as after training, eta and slopes too."""

    def scatter(form, seed=0):
        randomize(form, seed)
        generator = torch.Generator().manual_seed(seed)
        for name, p in form.named_parameters():
            if name.endswith(('eta', 'slope', 'offset')):
                p.data.copy_(torch.rand(p.shape, generator=generator) * 2 - 1)
        return form

    return scatter


def rep_bn(rep, x, training):
    tokens = x.flatten(0, -2)
    mean, var = rep.bn.running_mean, rep.bn.running_var
    if training:
        mean, var = tokens.mean(0), tokens.var(0, unbiased=False)
    return (x - mean) / (var + rep.bn.eps).sqrt() * rep.bn.weight + rep.bn.bias + rep.eta * x


@pytest.mark.parametrize('lam', [0.0, 0.3, 1.0])
@pytest.mark.parametrize('training', [True, False])
def test_forms_are_the_equations(lam, training, scattered, relative_error):
    x = torch.randn(3, 7, 16, dtype=torch.double) * 2 + 1
    norm = set_lam_(scattered(ProgressiveNorm(16)).double(), lam).train(training)
    layer_norm = F.layer_norm(x, (16,), norm.ln.weight, norm.ln.bias, norm.ln.eps)
    expected = lam * layer_norm + (1 - lam) * rep_bn(norm.rep, x, training)
    assert relative_error(norm(x), expected) < 1e-12


@pytest.mark.parametrize('kwargs', [dict(affine=False), dict(momentum=None), {}])
def test_merges_with_other_batch_norms(kwargs, scattered, relative_error):
    """Also where a channel is constant."""
    form = NormedLinear(ProgressiveNorm(16, dict(type='BN', **kwargs)), nn.Linear(16, 24))
    finish_schedules_(scattered(form)).double().train()
    x = torch.randn(4, 9, 16, dtype=torch.double)
    x[..., 3] = 2.5
    for _ in range(3):
        form(x)
    form.norm.rep.bn.running_var[3] = 0
    form.eval()
    assert relative_error(form.merge()(x), form(x)) < 1e-12
    form.norm.rep.bn.eps = 0
    with pytest.raises(ValueError, match='exceed the range'):
        form.merge()


def test_bad_input():
    norm = ProgressiveNorm(8)
    for lam in (-1, 2, float('nan')):
        with pytest.raises(ValueError, match='lambda must be'):
            set_lam_(norm, lam)
    with pytest.raises(ValueError, match='Linear has no Scheduled'):
        set_lam_(nn.Linear(2, 2), 0)
    for norm_cfg in (dict(type='LN'), dict(type='BN', track_running_stats=False)):
        with pytest.raises(ValueError, match="takes 'BN' or 'SyncBN', with running statistics"):
            ProgressiveNorm(8, norm_cfg)
    set_lam_(norm, 0).rep.bn.running_mean = None
    with pytest.raises(ValueError, match='without running statistics'):
        norm.merge()
