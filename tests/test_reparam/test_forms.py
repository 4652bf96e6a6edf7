"""One table of forms through the same tests."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mmengine.model import revert_sync_batchnorm

from repa_mm.reparam import (
    ChannelIdleFFN,
    CheckpointError,
    FFNParts,
    MergedFFN,
    finish_schedules_,
    fold_norm,
    is_reparameterized,
    reparameterize,
)
from tests.toy import Adapter

C, H = 16, 40


def idle(**kwargs):
    return lambda: ChannelIdleFFN(C, H, layer_scale_init_value=0.5, **kwargs)


# What makes a training form, what it merges into, and how many ordinary parts fill it.
FORMS = dict(
    idle=(idle(), MergedFFN, 1),
    idle_0=(idle(idle_ratio=0), MergedFFN, 1),
    idle_1=(idle(idle_ratio=1), MergedFFN, 1),
    idle_sync=(idle(norm_cfg=dict(type='SyncBN'), drop_path=0.3), MergedFFN, 1),
    idle_ln=(idle(norm_cfg=dict(type='LN')), MergedFFN, 1),
    # As MMEngine leaves SyncBN on one device: not of PyTorch's classes.
    idle_reverted=(lambda: revert_sync_batchnorm(FORMS['idle_sync'][0]()), MergedFFN, 1),
    idle_gn=(idle(norm_cfg=dict(type='TokenGN'), idle_ratio=0.5), MergedFFN, 1),
)
every = pytest.mark.parametrize('name', FORMS)


@pytest.fixture
def make(randomize):
    """A form as after training, whose schedule has ended."""

    def build(name, seed=0):
        form = randomize(FORMS[name][0](), seed)
        generator = torch.Generator().manual_seed(seed)
        for key, p in form.named_parameters():
            if key.endswith(('eta', 'table')) or '.norm.' in f'.{key}':
                p.data.copy_(torch.rand(p.shape, generator=generator) * 2 - 1)
        return finish_schedules_(form)

    return build


def tokens(name, batch=4, **kwargs):
    return torch.randn(batch, 12, C, **kwargs)


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(sorted(FORMS)),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([1e-3, 1, 30]),
    hostile=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_merge_is_exact(name, seed, scale, hostile, dtype, make, relative_error):
    torch.manual_seed(seed)
    form = make(name, seed).to(dtype).eval()
    for norm in form.modules() if hostile else ():
        if isinstance(norm, nn.BatchNorm1d):
            norm.running_mean.mul_(100)
            norm.running_var.copy_(10 ** torch.empty_like(norm.running_var).uniform_(-6, 6))
    x = tokens(name, dtype=dtype) * scale
    exact = copy.deepcopy(form).double()(x.double())
    merged = form.merge()
    assert type(merged) is FORMS[name][1]
    # Large values round more, merged or not.
    error, own = relative_error(merged(x), exact), relative_error(form(x), exact)
    assert error < max(2e-6 if dtype == torch.float32 else 1e-14, 4 * own)


@every
def test_a_step_moves_every_parameter(name, make):
    form, start = make(name).train(), FORMS[name][0]().train()
    for each in (form, start):
        before = {key: value.clone() for key, value in each.named_parameters()}
        optimizer = torch.optim.Adam(each.parameters(), 1e-2)
        y = each(tokens(name))
        (y * torch.randn_like(y)).sum().backward()
        optimizer.step()
        for key, value in each.named_parameters():
            assert value.grad is not None, key  # distributed training waits for all of them
            ended = each is form
            without_weight = '.ln.' in f'.{key}' if ended else '.rep.' in f'.{key}'
            # A BatchNorm takes the bias of what is linear before it away, a softmax that of keys.
            free = key.endswith('bias') and ('qkv' in key or 'fc1' in key or name == 'idle_1')
            assert without_weight or free or (value != before[key]).any(), key


@every
def test_the_weights_of_the_other_form_are_refused(name, make):
    training = nn.ModuleDict(dict(part=make(name)))
    deployed = reparameterize(training)
    assert is_reparameterized(training, deployed.state_dict())
    assert not is_reparameterized(training, training.state_dict())
    for model, other, form in ((training, deployed, 'training'), (deployed, training, 'deploy')):
        model.load_state_dict(model.state_dict(), strict=True)
        with pytest.raises(CheckpointError, match=f"in its {form} form at 'part'"):
            model.load_state_dict(other.state_dict(), strict=False)


def ordinary(name):
    """Ordinary parts with random weights, and what the block computes of them."""
    norm = nn.LayerNorm(C)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.uniform_(norm.bias, -0.5, 0.5)
    scale = torch.rand(C) + 0.5
    parts = FFNParts(norm, nn.Linear(C, H), nn.GELU(), nn.Linear(H, C), scale)
    return parts, lambda x: parts.fc2(F.gelu(parts.fc1(norm(x)))) * scale


@pytest.mark.parametrize('missing', [(), ('bias',), ('weight',), ('weight', 'bias')])
def test_a_norm_folds_without_scale_or_shift(missing, relative_error):
    (norm, layer, *_), _ = ordinary('ffn')
    for name in missing:
        setattr(norm, name, None)
    x = tokens('ffn')
    folded = F.linear(F.layer_norm(x, [C]).double(), *fold_norm(norm, layer))
    assert relative_error(folded, layer(norm(x)).double()) < 1e-5


@every
def test_what_the_merge_does_not_know_is_refused(name, make):
    kinds = nn.Linear, nn.GroupNorm, nn.Dropout
    for key, module in make(name).named_modules():
        if type(module) not in kinds or 'attn_drop' in key:
            continue
        form = make(name)
        parent, _, child = key.rpartition('.')
        other = nn.Tanh()
        if type(module) is nn.Linear:
            other = Adapter(module.in_features, module.out_features, module.bias is not None)
        setattr(form.get_submodule(parent), child, other)
        with pytest.raises(ValueError, match=f'(is|are) a .*{type(other).__name__}'):
            form.merge()
        form = make(name)
        form.get_submodule(key).register_forward_hook(lambda module, args, y: y)
        with pytest.raises(ValueError, match='has a hook'):
            form.merge()
