"""Experts: trained apart, averaged, merged."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from projects.expert_averaging import ExpertLinear, ExpertsFFN, average_experts
from repa_mm.reparam import FFNParts


def test_every_token_goes_to_one_expert_in_equal_parts():
    ffn = ExpertsFFN(4, 8, 3).train()
    for e, expert in enumerate(ffn.fc2.experts):
        nn.init.zeros_(expert.weight)
        nn.init.constant_(expert.bias, float(e))
    x = torch.randn(5, 6, 4)
    counts = torch.zeros(30, 3)
    for _ in range(200):
        chosen = (ffn(x) - x).round()[..., 0].flatten().long()
        assert torch.bincount(chosen, minlength=3).tolist() == [10, 10, 10]
        counts[torch.arange(30), chosen] += 1
    # At random: every token meets every expert.
    assert counts.min() > 30
    # Fewer tokens than experts leave no parameter without a gradient.
    ffn(x[:1, :2]).sum().backward()
    assert all(p.grad is not None for p in ffn.parameters())


def test_equal_experts_are_one_ffn(randomize, relative_error):
    form = randomize(ExpertsFFN(16, 40, 4, layer_scale_init_value=0.5)).double().train()
    average_experts(form, 0.75)  # of 4, each is the mean afterwards
    x = torch.randn(4, 12, 16, dtype=torch.double)
    other = copy.deepcopy(form).eval()
    z = other.fc2(F.gelu(other.fc1(x)))
    assert relative_error(form(x), x + z * other.layer_scale) < 1e-12


@pytest.mark.parametrize('rate', [0.0, 0.1, 1.0])
def test_averaging(rate):
    layer = ExpertLinear(3, 5, 4).double()
    before = [expert.weight.clone() for expert in layer.experts]
    mean = layer.weight.clone()
    average_experts(layer, rate)
    for e, expert in enumerate(layer.experts):
        others = sum(before[j] for j in range(4) if j != e) / 3
        assert torch.allclose(expert.weight, (1 - rate) * before[e] + rate * others)
    assert torch.allclose(layer.weight, mean)
    single = ExpertLinear(3, 5, 1)
    weight = single.weight.clone()
    assert torch.equal(average_experts(single, rate).weight, weight)


def test_bad_input():
    with pytest.raises(ValueError, match='1 expert or more'):
        ExpertsFFN(8, 16, 0)
    with pytest.raises(ValueError, match='no experts to average'):
        average_experts(nn.Linear(2, 2), 0.5)
    for rate in (-0.1, 1.5, float('nan')):
        with pytest.raises(ValueError, match='rate must be a number from 0 to 1'):
            average_experts(ExpertsFFN(8, 16), rate)


@pytest.mark.parametrize('number', [1, 2])
@pytest.mark.parametrize('own, scaled', [(0.5, True), (0.5, False), (0.0, True)])
def test_layer_scales_of_what_fills_experts(number, own, scaled, relative_error):
    def part():
        fc1, fc2, scale = nn.Linear(8, 12), nn.Linear(12, 8), torch.rand(8)
        return FFNParts(nn.LayerNorm(8), fc1, nn.GELU(), fc2, scale if scaled else None)

    parts = [part() for _ in range(number)]
    ffn = ExpertsFFN(8, 12, 2, layer_scale_init_value=own).eval()
    ffn.fill(*parts)
    x = torch.randn(2, 3, 8)
    w1, b1, w2, b2 = (
        sum(getattr(getattr(p, fc), key) * s for p, s in zip(parts, scales)) / number
        for fc in ('fc1', 'fc2')
        for key, scales in (
            ('weight', [1 if fc == 'fc1' or not scaled else p.scale[:, None] for p in parts]),
            ('bias', [1 if fc == 'fc1' or not scaled else p.scale for p in parts]),
        )
    )
    expected = x + F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)
    assert relative_error(ffn(x), expected) < 1e-5
