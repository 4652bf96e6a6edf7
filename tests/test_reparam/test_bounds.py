"""How far merge, folded training and fast window attention are from float64.

The bounds are twice those of docs/reliability.md, which are the worst of 1,000 cases, or 16 times
the error of the literal equation in the same dtype, where values are ill-conditioned.
"""

import copy
import re
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from mmpretrain.models.utils.attention import ShiftWindowMSA

from repa_mm.faster import FastShiftWindowMSA, fast_window_attention_
from repa_mm.reparam import ChannelIdleFFN, set_shortcut_, set_training_path_
from repa_mm.surgery import become_
from tests.toy import step

DOCS = Path(__file__).parents[2] / 'docs' / 'reliability.md'
BOUNDS = {
    name: (float(ordinary), float(any_values))
    for name, ordinary, any_values in re.findall(
        r'^\| ([\w ,]+) \| ([\d.e-]+) \| ([\d.e-]+) \|$', DOCS.read_text(), re.M
    )
}
# float16 products on a CPU came with torch 2.2 or so.
DTYPES = ['float64', 'float32', 'bfloat16'] + ['float16'] * hasattr(torch, 'get_autocast_dtype')


def many(n):
    checks = list(HealthCheck)
    return settings(max_examples=n, deadline=None, database=None, suppress_health_check=checks)


class Draw:
    """Random tensors in float64, of ordinary values or of any."""

    def __init__(self, seed, hostile):
        self.generator, self.hostile = torch.Generator().manual_seed(seed), hostile

    def pick(self, *values):
        return values[int(torch.randint(len(values), (), generator=self.generator))]

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def scales(self, n):
        """Positive numbers, within one or ten orders of magnitude."""
        spread = self.pick(0, 2, 10) if self.hostile else self.pick(0, 1)
        exponents = torch.rand(n, generator=self.generator, dtype=torch.float64) - 0.5
        return 10 ** (spread * exponents)

    def tokens(self, batch, length, channels):
        x = self.normal(batch, length, channels)
        if self.hostile:
            content = self.pick('random', 'constant', 'some constant', 'zero', 'dependent')
            x[..., :: 2 if content == 'some constant' else 1] *= content not in (
                'constant', 'some constant',
            )  # fmt: skip
            if content == 'dependent':
                x = x[..., :1] + 1e-2 * x
            x = (x + self.pick(0, 30) * self.normal(channels)) * (content != 'zero')
            x = x * 10.0 ** self.pick(-4, 0, 4)
        x = x * self.scales(channels)
        # As of a feature map, whose channels come first.
        return x.transpose(1, 2).contiguous().transpose(1, 2) if self.pick(0, 1) else x

    def ffn(self, channels, **kwargs):
        ffn = ChannelIdleFFN(
            channels,
            channels * self.pick(1, 2, 4),
            self.pick(0, 0.1, 1 / 3, 0.75, 1),
            act_cfg=dict(type=self.pick('GELU', 'ReLU', 'SiLU')),
            norm_cfg=dict(type=self.pick('BN', 'SyncBN', 'LN')),
            layer_scale_init_value=self.pick(0, 1e-5, 30),
            **kwargs,
        ).double()
        for key, value in ffn.state_dict().items():
            if key.endswith('running_var'):
                value.copy_(self.scales(len(value)) ** 2)
                value[::2] *= not self.hostile or self.pick(0, 1)
            elif key.startswith('norm') and value.ndim:
                value.copy_(self.normal(len(value)) * self.scales(len(value)))
            elif key.startswith('fc'):
                value.copy_(self.normal(*value.shape) / value.shape[-1] ** 0.5)
        return ffn.eval()


def check(name, hostile, found, literal, exact):
    """Compare results with those in float64; ``literal`` are those of the equation in the dtype."""
    for key, value in exact.items():
        size = value.abs().max() if value.numel() else torch.tensor(0.0)
        if size < 1e-3 * exact['y'].abs().max():  # next to nothing: rounding errors alone
            continue
        error, own = (((r[key].double() - value).abs().max() / size) for r in (found, literal))
        bound = BOUNDS[name][hostile]
        assert error <= max(2 * bound, 16 * own), (key, float(error), float(own))


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('hostile', [False, True])
@many(40)
@given(seed=st.integers(0, 2**16), channels=st.sampled_from([1, 3, 24, 64]))
def test_merge(hostile, dtype, seed, channels):
    draw, kind = Draw(seed, hostile), getattr(torch, dtype)
    ffn = draw.ffn(channels).to(kind)
    x = draw.tokens(draw.pick(1, 3), draw.pick(1, 5, 200), channels).to(kind)
    assume(all(value.isfinite().all() for value in (x, *ffn.state_dict().values())))
    exact = copy.deepcopy(ffn).double().forward_literal(x.double()).detach()
    literal = ffn.forward_literal(x).detach()
    assume(literal.isfinite().all())
    try:
        merged = ffn.merge()
    except ValueError as error:
        assume('exceed the range' not in str(error))
        raise
    set_shortcut_(merged, draw.pick('inside', 'outside'))
    found = merged(x).detach()
    check(f'merge, {dtype}', hostile, dict(y=found), dict(y=literal), dict(y=exact))


@pytest.mark.parametrize('hostile', [False, True])
@many(40)
@given(seed=st.integers(0, 2**16), channels=st.sampled_from([1, 3, 24]))
def test_folded_training(hostile, seed, channels):
    draw = Draw(seed, hostile)
    ffn = draw.ffn(channels).float().train()
    if draw.pick(0, 0, 1):  # frozen statistics
        ffn.norm1.eval(), ffn.norm2.eval()
    x = draw.tokens(draw.pick(1, 3), draw.pick(49, 200), channels).float()
    exact = step(set_training_path_(copy.deepcopy(ffn), 'literal').double(), x.double())
    assume(all(value.isfinite().all() for value in exact.values()))
    # The second BatchNorm takes off what biases add to idle channels.
    for key in ('fc1.bias', 'norm1.bias'):
        exact.pop(key, None)
    literal, found = (step(set_training_path_(ffn, path), x) for path in ('literal', 'folded'))
    check('folded training, float32', hostile, found, literal, exact)


class Traced(FastShiftWindowMSA):
    def forward(self, query, hw_shape):
        return self._forward_plain(query, self.geometry(query, hw_shape))


@pytest.mark.parametrize('hostile', [False, True])
@many(40)
@given(seed=st.integers(0, 2**16), traced=st.booleans())
def test_window_attention(hostile, seed, traced):
    draw = Draw(seed, hostile)
    heads, channels, window = draw.pick(1, 3), draw.pick(1, 8), draw.pick(2, 3, 7)
    shift = draw.pick(0, window // 2)
    stock = ShiftWindowMSA(heads * channels, heads, window, shift, pad_small_map=True).double()
    for p in stock.parameters():
        p.data.copy_(draw.normal(*p.shape) / (p.shape[-1] ** 0.5 if p.ndim == 2 else 1))
    stock.float()
    size = draw.pick(1, 6, 7, 15), draw.pick(3, 7, 14)
    x = draw.tokens(draw.pick(1, 3), size[0] * size[1], heads * channels)
    x = (x / x.abs().max().clamp(min=1e-30)).float()
    exact = step(stock.double(), x.double(), size)
    literal = step(stock.float(), x, size)
    fast = fast_window_attention_(stock)
    if traced:  # what compilers see, run eagerly
        become_(fast, Traced)
    found = step(fast, x, size)
    check('window attention, float32', hostile, found, literal, exact)
