"""Merging and the fast paths with hardly any tokens, and values that are refused."""

import copy

import pytest
import torch
import torch.nn as nn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from repa_mm.reparam import ChannelIdleFFN, reparameterize, reparameterize_, set_training_path_


def all_of(ffn, x, path):
    """Output, gradients and statistics of a step of training, or its error."""
    ffn = set_training_path_(copy.deepcopy(ffn), path).train()
    x = x.detach().requires_grad_()
    try:
        y = ffn(x)
    except ValueError as error:
        return str(error)
    y.sum().backward()
    return [y, x.grad, *(p.grad for p in ffn.parameters()), *ffn.buffers()]


@settings(max_examples=20, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    shape=st.sampled_from(
        [(1, 1, 8), (0, 5, 8), (2, 0, 8), (0, 8), (1, 8), (8,), (2, 1, 8), (2, 3, 1, 8)]
    ),
    norm=st.sampled_from(['BN', 'LN']),
    idle_ratio=st.sampled_from([0, 0.75, 1]),
    eval_norms=st.booleans(),
)
def test_hardly_any_tokens(shape, norm, idle_ratio, eval_norms):
    """Folded as literal; BatchNorm says that it needs two."""
    ffn = ChannelIdleFFN(8, 16, idle_ratio, norm_cfg=dict(type=norm)).double()
    x = torch.randn(shape, dtype=torch.double)
    num_tokens = x.numel() // 8
    ffn.eval()
    for form in (ffn, ffn.merge()):
        assert form(x).shape == x.shape
    ffn.train()
    literal, found = all_of(ffn, x, 'literal'), all_of(ffn, x, 'folded')
    if norm == 'BN' and num_tokens == 1:
        assert found == literal and 'more than 1 value' in found
        return
    for actual, expected in zip(found, literal):
        assert actual.isfinite().all()
        assert torch.allclose(actual, expected, atol=1e-9)
    if num_tokens == 0:  # nothing is learned from nothing
        for before, after in zip(list(ffn.buffers())[-6:], found[-6:]):
            assert before.ndim == 0 or torch.equal(before, after)


def model(**kwargs):
    """With a FFN at 'backbone.blocks.1.ffn'."""
    blocks = nn.ModuleList(
        [nn.ModuleDict(dict(ffn=ChannelIdleFFN(8, 16, **kwargs))) for _ in range(3)]
    )
    return nn.ModuleDict(dict(backbone=nn.ModuleDict(dict(blocks=blocks))))


@pytest.mark.parametrize(
    'name, value',
    [
        ('fc1.weight', float('nan')),
        ('fc2.bias', float('inf')),
        ('norm1.weight', -float('inf')),
        ('norm1.running_mean', float('nan')),
        ('norm2.running_var', float('inf')),
        ('layer_scale', float('nan')),
    ],
)
def test_values_that_are_none_are_reported(name, value):
    broken = model(layer_scale_init_value=1)
    ffn = broken.backbone.blocks[1].ffn
    ffn.state_dict()[name].view(-1)[3:5] = value
    for merge in (reparameterize, reparameterize_):
        with pytest.raises(ValueError, match=f"merge 'backbone.blocks.1.ffn': {name} has .*finite"):
            merge(broken)
    with pytest.raises(ValueError, match=f'^{name} has values that are not finite'):
        ffn.switch_to_deploy()
    # None of it was merged.
    assert all(isinstance(block.ffn, ChannelIdleFFN) for block in broken.backbone.blocks)


@pytest.mark.parametrize('dtype, factor', [(torch.float32, 1e30), (torch.float16, 1e3)])
def test_overflow_of_the_merged_weights_is_reported(dtype, factor):
    broken = model()
    ffn = broken.backbone.blocks[0].ffn
    ffn.fc1.weight.data.mul_(factor)
    ffn.fc2.weight.data.mul_(factor)
    broken.to(dtype)
    message = f"'backbone.blocks.0.ffn': the merged weights, .*, exceed the range of {dtype}"
    with pytest.raises(ValueError, match=message):
        reparameterize(broken)
    # In float64 it does fit.
    assert reparameterize(broken.double())
