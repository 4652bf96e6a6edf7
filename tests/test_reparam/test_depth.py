"""Parallel branches against their equations, written out branch by branch."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from repa_mm.reparam import (
    ChannelIdleFFN,
    CheckpointError,
    MergedFFN,
    OrdinaryAttention,
    OrdinaryFFN,
    ParallelAttention,
    ParallelFFN,
    add_branches,
    finish_schedules,
    is_reparameterized,
    join_branches,
    reparameterize,
)


def branched(dims, hidden, num_branches, ratio=0.75, **kwargs):
    return add_branches(ChannelIdleFFN(dims, hidden, ratio, **kwargs), num_branches)


LAMS = (0.0, 0.3, 0.7, 1.0)
FORMS = dict(
    attention=lambda b: ParallelAttention(16, 4, b, layer_scale_init_value=0.5),
    windows=lambda b: ParallelAttention(16, 4, b, window_size=(3, 4), qk_scale=0.3),
    ffn=lambda b: ParallelFFN(16, 40, b, layer_scale_init_value=0.5),
    idle=lambda b: branched(16, 40, b, layer_scale_init_value=0.5),
)


def many(n):
    return settings(
        max_examples=n, deadline=None, database=None, suppress_health_check=list(HealthCheck)
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


@pytest.mark.parametrize('path', ['literal', 'folded'])
@pytest.mark.parametrize('lam', LAMS)
@pytest.mark.parametrize('norm', ['BN', 'LN'])
def test_idle_branches_join_where_they_are_active(path, lam, norm, randomize, relative_error):
    form = randomize(branched(16, 40, 3, 0.75, norm_cfg=dict(type=norm))).double().train()
    form.training_path = path
    join_branches(form, lam)
    before = copy.deepcopy(form)
    x = torch.randn(2, 30, 16, dtype=torch.double)
    u = before.norm1(x.flatten(0, 1))
    active, idle = zip(*(b(u).tensor_split([10], dim=1) for b in before.fc1.branches))
    a = torch.cat([F.gelu(torch.cat(joined(active, lam), 1)), *idle], 1)
    expected = x + before.fc2(before.norm2(a)).view(x.shape)
    assert relative_error(form(x), expected) < 1e-12


def test_one_branch_is_an_ordinary_layer(randomize, relative_error):
    x = torch.randn(2, 12, 16)
    for make in FORMS.values():
        form = randomize(make(1)).eval()
        unjoined = form(x)
        assert relative_error(join_branches(form, 1)(x), unjoined) < 1e-6


@many(60)
@given(
    name=st.sampled_from(sorted(FORMS)),
    num_branches=st.integers(1, 5),
    bias=st.booleans(),
    layer_scale=st.sampled_from([0, 1e-3]),
    masked=st.booleans(),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([1e-3, 1, 30]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_merge_is_exact(
    name, num_branches, bias, layer_scale, masked, seed, scale, dtype, randomize, relative_error
):
    torch.manual_seed(seed)
    kwargs = dict(drop_path=0.3, layer_scale_init_value=layer_scale)
    if name in ('attention', 'windows'):
        window = (3, 4) if name == 'windows' else None
        kwargs.update(qkv_bias=bias, window_size=window, attn_drop=0.2, proj_drop=0.2)
        form = ParallelAttention(16, 4, num_branches, **kwargs)
    else:
        kind = branched if name == 'idle' else ParallelFFN
        form = kind(16, 40, num_branches, drop_rate=0.2, **kwargs)
    form = randomize(form, seed).to(dtype).eval()
    join_branches(form, 1)
    args = [torch.randn(6, 12, 16, dtype=dtype) * scale]
    if masked and 'window_size' in kwargs:
        mask = torch.zeros(2, 12, 12, dtype=dtype)
        mask[torch.rand(mask.shape) < 0.3] = -100
        args.append(mask)
    exact = general(form).double()(*(a.double() for a in args))
    error = relative_error(form.merge()(*args), exact)
    # Large scores round more in the softmax, merged or not.
    own = relative_error(form(*args), exact)
    assert error < max(1e-6 if dtype == torch.float32 else 1e-14, 4 * own)
    assert scale > 1 or error < 1e-6


def test_merged_forms_are_ordinary(randomize):
    kinds = dict(
        attention=OrdinaryAttention, windows=OrdinaryAttention, ffn=OrdinaryFFN, idle=MergedFFN
    )
    for name, make in FORMS.items():
        merged = join_branches(randomize(make(3)), 1).merge()
        assert type(merged) is kinds[name]
        one = join_branches(make(1), 1).merge()
        shapes = {key: value.shape for key, value in one.state_dict().items()}
        assert {key: value.shape for key, value in merged.state_dict().items()} == shapes


def test_boolean_masks(randomize, relative_error):
    form = randomize(ParallelAttention(16, 4, 2)).eval()
    mask = torch.rand(2, 12, 12) < 0.7
    mask |= torch.eye(12, dtype=torch.bool)
    x = torch.randn(2, 12, 16)
    expected = form(x, torch.zeros(mask.shape).masked_fill(~mask, float('-inf')))
    assert relative_error(form(x, mask), expected) < 1e-6


@pytest.mark.parametrize('name', FORMS)
@pytest.mark.parametrize('lam', LAMS)
def test_a_step_moves_every_parameter(name, lam, randomize):
    form = join_branches(randomize(FORMS[name](2)).train(), lam)
    before = {key: value.clone() for key, value in form.named_parameters()}
    optimizer = torch.optim.Adam(form.parameters(), 1e-2)
    (form(torch.randn(4, 12, 16)) * torch.randn(4, 12, 16)).sum().backward()
    optimizer.step()
    for key, value in form.named_parameters():
        changed = value != before[key]
        # Keys share one bias without effect: the softmax does not see it.
        if key.endswith('bias') and 'qkv' in key:
            changed = torch.cat([changed[:16], changed[32:]])
        # The second BatchNorm takes the bias of idle channels away.
        if name == 'idle' and 'fc1' in key and key.endswith('bias'):
            changed = changed[:10]
        assert changed.all(), key


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


@pytest.mark.parametrize('name', FORMS)
def test_merging_too_early_is_refused(name):
    form = FORMS[name](2)
    with pytest.raises(ValueError, match='joined to lambda = 0, .*exactly at lambda = 1'):
        form.merge()
    for lam, text in ((0.999, '0.999'), (1 - 2**-24, '0.9999999')):
        join_branches(form, lam)
        with pytest.raises(ValueError, match=f'lambda = {text}.*train on'):
            form.switch_to_deploy()
    model = nn.Sequential(form)
    with pytest.raises(ValueError, match=r"cannot merge '0': .*lambda = 0\.9999999"):
        reparameterize(model)
    assert model[0] is form and isinstance(form, type(FORMS[name](2)))
    reparameterize(finish_schedules(model))


def test_bad_input():
    form = ParallelFFN(8, 16, 2)
    for lam in (-0.1, 1.1, float('nan'), 'one', True, None):
        with pytest.raises(ValueError, match='lambda must be a number from 0 to 1'):
            join_branches(form, lam)
    with pytest.raises(ValueError, match='Linear has no parallel branches'):
        join_branches(nn.Linear(2, 2), 0.5)
    for kind, args in ((ParallelAttention, (16, 4)), (ParallelFFN, (16, 40)), (branched, (16, 40))):
        for num_branches in (0, -1, 1.5, True, '2'):
            with pytest.raises(ValueError, match='1 branch or more'):
                kind(*args, num_branches)
    with pytest.raises(ValueError, match='16 channels are no multiple of 3 heads'):
        ParallelAttention(16, 3)


def test_lambda_is_state():
    for make in FORMS.values():
        form, other = join_branches(make(2), 1), make(2)
        entry = next(m for m in other.modules() if hasattr(m, 'lam'))
        assert entry.lam == 0 and not entry.is_finished
        other.load_state_dict(form.state_dict())
        assert entry.lam == 1 and entry.is_finished
        other.load_state_dict(make(2).state_dict())
        assert entry.lam == 0 and not entry.is_finished
        assert copy.deepcopy(form).merge()
        # In half precision, too, the end is the end.
        assert form.bfloat16().merge()


@pytest.mark.parametrize('name', FORMS)
def test_checkpoints_of_the_other_form_are_refused(name, randomize):
    training = nn.ModuleDict(dict(block=randomize(FORMS[name](2))))
    deployed = reparameterize(finish_schedules(copy.deepcopy(training)))
    assert is_reparameterized(training, deployed.state_dict())
    assert not is_reparameterized(training, training.state_dict())
    for model in (training, deployed):
        model.load_state_dict(model.state_dict())
    with pytest.raises(CheckpointError, match="in its training form at 'block'"):
        training.load_state_dict(deployed.state_dict(), strict=False)
    with pytest.raises(CheckpointError, match="in its deploy form at 'block'"):
        deployed.load_state_dict(training.state_dict(), strict=False)
    wider = nn.ModuleDict(dict(block=FORMS[name](3)))
    with pytest.raises(CheckpointError, match='something else there|differ in architecture'):
        wider.load_state_dict(training.state_dict(), strict=False)


def test_what_the_merge_does_not_know_is_refused():
    class Adapter(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    for make in FORMS.values():
        form = join_branches(make(2), 1)
        entry = form.qkv if hasattr(form, 'qkv') else form.fc1
        entry.branches[1] = Adapter(16, len(entry.branches[1].bias))
        with pytest.raises(ValueError, match='a branch is a Adapter'):
            form.merge()
        form = join_branches(make(2), 1)
        exit = 'proj' if hasattr(form, 'proj') else 'fc2'
        setattr(form, exit, Adapter(*reversed(getattr(form, exit).weight.shape)))
        with pytest.raises(ValueError, match=f'its {exit} is a Adapter'):
            form.merge()


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


def test_idle_branches_are_of_one_channel_idle_ffn():
    """Branches add width: one branch of each has the ordinary number of active channels."""
    form = join_branches(branched(16, 40, 3, 0.75), 1)
    assert isinstance(form, ChannelIdleFFN) and form.num_active == 30
    merged = form.merge()
    assert merged.num_active == 10 and merged.fc1.weight.shape == (26, 16)
    form = join_branches(branched(16, 40, 3, 1.0), 1)
    assert form.merge().fc2 is None


@pytest.mark.parametrize('name', FORMS)
def test_empty_batches(name):
    """As of a detector without proposals."""
    form = FORMS[name](2).eval()
    x = torch.randn(0, 12, 16)
    assert form(x).shape == x.shape
    join_branches(form, 1)
    assert form(x).shape == form.merge()(x).shape == x.shape
