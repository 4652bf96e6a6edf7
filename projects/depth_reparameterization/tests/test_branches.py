"""Parallel branches against their equations, written out branch by branch."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.model import ExponentialMovingAverage

from projects.depth_reparameterization import ParallelAttention, ParallelFFN, join_branches

LAMS = (0.0, 0.3, 0.7, 1.0)
FORMS = dict(
    attention=lambda b: ParallelAttention(16, 4, b, layer_scale_init_value=0.5),
    windows=lambda b: ParallelAttention(16, 4, b, window_size=(3, 4), qk_scale=0.3),
    ffn=lambda b: ParallelFFN(16, 40, b, layer_scale_init_value=0.5),
)


def general(form):
    """A copy that goes the way which is right for every lambda."""
    form = copy.deepcopy(form)
    for module in form.modules():
        if hasattr(module, 'is_finished'):
            module.is_finished = False
    return form


def joined(z, lam):
    """Of each branch, (1 - lambda) z_b + lambda mean(z)."""
    mean = sum(z) / len(z)
    return [(1 - lam) * each + lam * mean for each in z]


def columns(matrix, num_branches):
    return matrix.chunk(num_branches, dim=1)


def attention(form, x, lam, mask=None):
    """The equations of the paper: heads summed, branch by branch, in the parameters' dtype."""
    heads, d = form.num_heads, form.embed_dims // form.num_heads
    q, k, v = zip(*(branch(x).chunk(3, dim=-1) for branch in form.qkv.branches))
    q, k, v = (joined(z, lam) for z in (q, k, v))
    out = form.proj.bias + torch.zeros_like(x)
    tables = None
    if form.window_size is not None:
        tables = joined(form.relative_position_bias_table.chunk(form.num_branches, dim=1), lam)
    for b, w_out in enumerate(columns(form.proj.weight, form.num_branches)):
        for h in range(heads):
            part = slice(h * d, (h + 1) * d)
            scores = q[b][..., part] @ k[b][..., part].transpose(1, 2) * form.scale
            if tables is not None:
                scores = scores + tables[b][form.relative_position_index, h]
            if mask is not None:
                scores = scores + mask.repeat(len(x) // len(mask), 1, 1)
            out = out + scores.softmax(-1) @ v[b][..., part] @ w_out[:, part].T
    return out if form.layer_scale is None else out * form.layer_scale


def ffn(form, x, lam):
    h = joined([branch(x) for branch in form.fc1.branches], lam)
    out = form.fc2.bias
    for each, w_out in zip(h, columns(form.fc2.weight, form.num_branches)):
        out = out + F.gelu(each) @ w_out.T
    return x + (out if form.layer_scale is None else out * form.layer_scale)


@pytest.mark.parametrize('num_branches', [1, 2, 3])
@pytest.mark.parametrize('lam', LAMS)
@pytest.mark.parametrize('training', [True, False])
def test_forms_are_the_equations(num_branches, lam, training, randomize, relative_error):
    x = torch.randn(6, 12, 16, dtype=torch.double)
    mask = torch.randn(3, 12, 12, dtype=torch.double)
    mask[torch.rand(mask.shape) < 0.3] = -100
    for name in ('attention', 'windows', 'ffn'):
        form = randomize(FORMS[name](num_branches)).double().train(training)
        join_branches(form, lam)
        if name == 'ffn':
            assert relative_error(form(x), ffn(form, x, lam)) < 1e-12
            continue
        assert relative_error(form(x), attention(form, x, lam)) < 1e-12
        assert relative_error(form(x, mask), attention(form, x, lam, mask)) < 1e-12


def test_one_branch_is_an_ordinary_layer(randomize, relative_error):
    x = torch.randn(2, 12, 16)
    for make in FORMS.values():
        form = randomize(make(1)).eval()
        unjoined = form(x)
        assert relative_error(join_branches(form, 1)(x), unjoined) < 1e-6


def test_boolean_masks(randomize, relative_error):
    form = randomize(ParallelAttention(16, 4, 2)).eval()
    mask = torch.rand(2, 12, 12) < 0.7
    mask |= torch.eye(12, dtype=torch.bool)
    x = torch.randn(2, 12, 16)
    expected = form(x, torch.zeros(mask.shape).masked_fill(~mask, float('-inf')))
    assert relative_error(form(x, mask), expected) < 1e-6


@pytest.mark.parametrize('name', FORMS)
def test_joined_training_is_the_general_one(name, randomize, relative_error):
    """Once lambda is 1, one branch is computed: the same output, gradients and statistics."""
    form = join_branches(randomize(FORMS[name](3)).double().train(), 1)
    other = general(form)
    x, weight = torch.randn(2, 4, 12, 16, dtype=torch.double)
    for each in (form, other):
        (each(x) * weight).sum().backward()
    assert relative_error(form(x), other(x)) < 1e-12
    for (key, p), expected in zip(form.named_parameters(), other.parameters()):
        error = (p.grad - expected.grad).abs().max()
        assert error < 1e-10 * max(expected.grad.abs().max(), 1), key


def test_stochastic_depth_and_dropout(randomize):
    for kind, args in ((ParallelAttention, (16, 4, 2)), (ParallelFFN, (16, 40, 2))):
        form = randomize(kind(*args, drop_path=0.5)).train()
        x = torch.randn(64, 5, 16)
        z = form(x) - (x if kind is ParallelFFN else 0)
        dropped = (z == 0).flatten(1).all(1) | ((z.abs() < 1e-7).flatten(1).all(1))
        assert 5 < dropped.sum() < 59
        assert not (form.eval()(x) - (x if kind is ParallelFFN else 0) == 0).flatten(1).all(1).any()


def test_bad_input():
    form = ParallelFFN(8, 16, 2)
    for lam in (-0.1, 1.1, float('nan')):
        with pytest.raises(ValueError, match='lambda must be a number from 0 to 1'):
            join_branches(form, lam)
    with pytest.raises(ValueError, match='Linear has no JoinedLinear'):
        join_branches(nn.Linear(2, 2), 0.5)
    for kind, args in ((ParallelAttention, (16, 4)), (ParallelFFN, (16, 40))):
        with pytest.raises(ValueError, match='1 branch or more'):
            kind(*args, 0)


def test_compiles_once_for_all_lambdas():
    form = ParallelFFN(8, 16, 2)
    count = 0

    def backend(graph, inputs):
        nonlocal count
        count += 1
        return graph.forward

    compiled = torch.compile(form, backend=backend)
    x = torch.randn(2, 3, 8)
    for lam in (0, 0.2, 0.4, 0.6):
        join_branches(form, lam)
        assert torch.allclose(compiled(x), form(x), atol=1e-6)
    assert count == 1


def test_an_average_knows_whether_its_branches_are_joined(randomize, relative_error):
    model = join_branches(randomize(nn.Sequential(ParallelFFN(8, 16))), 1)
    average = ExponentialMovingAverage(model)
    join_branches(model, 0)
    average.update_parameters(model)
    x = torch.randn(2, 5, 8)
    assert relative_error(average.eval()(x), model.eval()(x)) < 1e-6


def test_replaced_dropouts_are_refused():
    ffn = join_branches(ParallelFFN(8, 16), 1)
    ffn.dropout_layer = nn.Tanh()
    with pytest.raises(ValueError, match='Tanh'):
        ffn.merge()
