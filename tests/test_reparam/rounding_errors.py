"""How far from float64 the merged form and the fast paths can be.

A *case* is a dict of plain values, from which the module and its input are
made, so that a case can be printed and run again. Each result
of a computation (output, gradients, running statistics) has two errors:

- *relative*: its largest difference from the reference in float64, over the
  reference's largest value;
- in *roundings*: the same difference over the effect of one rounding: the
  difference of the literal computation in the same dtype, or what rounding
  once does to input, weights, statistics and the output of every layer, or
  to the terms that a gradient through a norm's statistics or a softmax is a
  sum of, whichever is most. An ill-conditioned case (a mean of 1000 standard
  deviations) has a large relative error in any algorithm; this one is large in
  a worse algorithm than the literal one only.
"""

import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn as nn

from repa_mm.reparam import ChannelIdleFFN, set_training_path

DTYPES = dict(
    float64=torch.float64, float32=torch.float32, bfloat16=torch.bfloat16, float16=torch.float16
)
Results = dict[str, torch.Tensor]

# What the fields of cases are drawn from.
FFN = dict(
    channels=(1, 2, 3, 8, 24, 64),
    expansion=(1, 2, 3, 4),
    idle_ratio=(0, 0.05, 0.1, 0.25, 1 / 3, 0.5, 2 / 3, 0.75, 0.9, 1),
    norm=('BN', 'LN'),
    act=('GELU', 'ReLU', 'SiLU'),
    layer_scale=(0, 1e-5, 1, 30),
    batch=(1, 2, 3),
    length=(1, 2, 5, 49, 200),
    # Orders of magnitude: of the statistics and parameters of the norms (from
    # one channel to another), and of the input's scale.
    spread=(0, 1, 2, 4, 10),
    scale=(-4, -1, 0, 1, 4),
    # Of the input, in its standard deviations.
    mean=(0, 1, 30, 1000),
    content=('random', 'constant', 'some constant', 'zero', 'dependent'),
    layout=('contiguous', 'channels first', 'every second', 'expanded'),
    seed=range(2**16),
)
MERGE = dict(
    FFN,
    shortcut=('inside', 'outside'),
    in_place=(False, True),
    zero_variance=(False, True),
    dtype=('float64', 'float32', 'bfloat16', 'float16'),
)
# At least twice as many tokens as channels, as folded training needs to be
# faster than the literal form and is chosen for.
FOLDED = dict(
    FFN,
    channels=(1, 2, 3, 8, 24),
    length=(49, 200),
    frozen=(False, True),
    dtype=('float32', 'float64'),
)
FEW_TOKENS = dict(FOLDED, channels=(3, 8, 24, 64), length=(2, 5))
ATTENTION = dict(
    heads=(1, 2, 3),
    head_channels=(1, 4, 8),
    window=(1, 2, 3, 7),
    shift=(0, 1, 2, 3),
    height=(1, 2, 6, 7, 8, 15),
    width=(1, 3, 7, 13, 14),
    batch=(1, 2, 3),
    scale=(-4, -1, 0, 1),
    spread=(0, 1, 2),
    content=('random', 'constant', 'some constant', 'zero', 'dependent'),
    mean=(0, 1, 30),
    layout=('contiguous', 'channels first', 'every second', 'expanded'),
    mode=('training', 'inference', 'traced'),
    dtype=('float64', 'float32'),
    seed=range(2**16),
)


class Error(NamedTuple):
    """See the module's docstring."""

    relative: float
    roundings: float


def _magnitudes(shape, spread: float, generator) -> torch.Tensor:
    """Positive values, spread over orders of magnitude around 1."""
    exponents = torch.rand(shape, generator=generator, dtype=torch.float64)
    return 10 ** ((exponents - 0.5) * spread)


def make_input(case: dict, length: int, channels: int) -> torch.Tensor:
    """Tokens (B, L, C) in float64, of values that the dtype has."""
    generator = torch.Generator().manual_seed(case['seed'])
    shape = case['batch'], length, channels
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    shift = case['mean'] * torch.randn(channels, generator=generator, dtype=torch.float64)
    content = case['content']
    if content == 'constant':
        x = torch.zeros_like(x)
    elif content == 'some constant':
        x[..., ::2] = 0
    elif content == 'dependent':
        x = x[..., :1] + 1e-2 * x
    x = (x + shift) * _magnitudes(channels, case['spread'], generator)
    x = x * 10.0 ** case['scale'] * (content != 'zero')
    x = x.to(DTYPES[case['dtype']]).double()
    return _with_layout(x, case['layout'])


def _with_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == 'channels first':  # tokens of an (N, C, H, W) map
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == 'every second':
        return torch.stack([x, x + 1], dim=2).flatten(1, 2)[:, ::2]
    if layout == 'expanded':
        return x[:1].expand(x.shape)
    return x


def make_ffn(case: dict) -> ChannelIdleFFN:
    """In float64 and eval mode, of values that the dtype has."""
    generator = torch.Generator().manual_seed(case['seed'] + 1)
    channels, spread = case['channels'], case['spread']
    ffn = ChannelIdleFFN(
        channels,
        channels * case['expansion'],
        case['idle_ratio'],
        act_cfg=dict(type=case['act']),
        norm_cfg=dict(type=case['norm']),
        layer_scale_init_value=case['layer_scale'],
    ).double()

    def normal(like):
        return torch.randn(like.shape, generator=generator, dtype=torch.float64)

    with torch.no_grad():
        for fc in (ffn.fc1, ffn.fc2):
            fc.weight.copy_(normal(fc.weight) / fc.in_features**0.5)
            fc.bias.copy_(normal(fc.bias))
        for norm in (ffn.norm1, ffn.norm2):
            if isinstance(norm, nn.Identity):
                continue
            norm.weight.copy_(
                normal(norm.weight) * _magnitudes(norm.weight.shape, spread, generator)
            )
            norm.bias.copy_(normal(norm.bias))
            if isinstance(norm, nn.BatchNorm1d):
                std = _magnitudes(norm.weight.shape, spread, generator)
                # As of inputs like the case's.
                if norm is ffn.norm1:
                    std = std * 10.0 ** case['scale']
                norm.running_var.copy_(std**2)
                norm.running_mean.copy_(normal(std) * std * max(case['mean'], 1))
                if case.get('zero_variance'):
                    norm.running_var[::2] = 0
        if case['layer_scale']:
            ffn.layer_scale.mul_(normal(ffn.layer_scale))
    return ffn.to(DTYPES[case['dtype']]).double().eval()


def run_merged(ffn: ChannelIdleFFN, x: torch.Tensor, case: dict) -> Results:
    """The deploy form of an FFN, as the case says."""
    ffn = copy.deepcopy(ffn)
    if case['in_place']:
        ffn.switch_to_deploy()
    else:
        ffn = ffn.merge()
    ffn.set_shortcut(case['shortcut'])
    with torch.no_grad():
        return dict(y=ffn(x))


def run_literal(ffn: ChannelIdleFFN, x: torch.Tensor, case: dict) -> Results:
    """Eq. 3 of the paper with the running statistics."""
    with torch.no_grad():
        return dict(y=ffn.forward_literal(x))


def run_training(
    ffn: ChannelIdleFFN, x: torch.Tensor, case: dict, path: str = 'literal'
) -> Results:
    """Output, gradients and running statistics of a step of training."""
    ffn = set_training_path(copy.deepcopy(ffn), path).train()
    if case['frozen']:
        ffn.norm1.eval(), ffn.norm2.eval()
    y, x = _backward(lambda x: ffn(x), x)
    found = {'y': y, 'x.grad': x.grad}
    found.update((f'{k}.grad', p.grad) for k, p in ffn.named_parameters())
    found.update((k, b) for k, b in ffn.named_buffers() if b.ndim)
    if not case['frozen'] and case['norm'] == 'BN':
        # The second BatchNorm takes off what biases add to idle channels, so
        # that these gradients are zero: what is computed is rounding errors.
        found['fc1.bias.grad'] = found['fc1.bias.grad'][: ffn.num_active]
        if not ffn.num_active:  # what beta1 does is one of these biases
            del found['norm1.bias.grad']
    return found


def run_folded(*args) -> Results:
    """As :func:`run_training`, folded."""
    return run_training(*args, path='folded')


class _FixedLayerNorm(nn.LayerNorm):
    """Without a gradient through its statistics."""

    def forward(self, x):
        var, mean = torch.var_mean(x.detach(), -1, False, keepdim=True)
        x = (x - mean) * (var + self.eps).rsqrt()
        return x * self.weight + self.bias


def run_without_statistics(ffn: ChannelIdleFFN, x: torch.Tensor, case: dict) -> Results:
    """As :func:`run_training`, but no gradient through the statistics.

    What it does to a gradient is to take the projection on them off it.
    """
    ffn = copy.deepcopy(ffn).train()
    if case['norm'] == 'LN':
        ffn.norm1.__class__ = _FixedLayerNorm
    elif not case['frozen']:
        for norm in (ffn.norm1, ffn.norm2):
            norm.momentum = 1.0
        biased = 1 - 1 / (x.shape[0] * x.shape[1])
        with torch.no_grad():
            ffn.forward_literal(x)
            for norm in (ffn.norm1, ffn.norm2):
                norm.running_var.mul_(biased)
    return run_training(ffn, x, dict(case, frozen=True))


def _backward(module: Callable, x: torch.Tensor):
    x = x.detach().requires_grad_()
    y = module(x)
    weights = torch.arange(y.numel(), dtype=torch.float64).sin()
    y.backward(weights.to(y).view(y.shape))
    return y.detach(), x


def make_attention(case: dict) -> nn.Module:
    """Mmpretrain's window attention in float64."""
    from mmpretrain.models.utils.attention import ShiftWindowMSA

    generator = torch.Generator().manual_seed(case['seed'] + 1)
    msa = (
        ShiftWindowMSA(
            case['heads'] * case['head_channels'],
            case['heads'],
            case['window'],
            min(case['shift'], case['window'] - 1),
            pad_small_map=True,
        )
        .double()
        .eval()
    )
    with torch.no_grad():
        for p in msa.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
            if p.ndim == 2:
                p.div_(p.shape[1] ** 0.5)
                p.mul_(_magnitudes(p.shape[:1], case['spread'], generator)[:, None])
    return msa.to(DTYPES[case['dtype']]).double()


def run_attention(msa: nn.Module, x: torch.Tensor, case: dict) -> Results:
    """Output and, unless the case is of inference, gradients."""
    msa = copy.deepcopy(msa)
    size = case['height'], case['width']
    if case['mode'] == 'inference':
        with torch.no_grad():
            return dict(y=msa(x, size))

    def forward(x):
        if case['mode'] == 'traced' and hasattr(msa, '_forward_traceable'):
            # What compilers see, run eagerly.
            return msa._forward_traceable(x, *size, msa.shift_size)
        return msa(x, size)

    y, x = _backward(forward, x)
    found = {'y': y, 'x.grad': x.grad}
    found.update((f'{k}.grad', p.grad) for k, p in msa.named_parameters())
    return found


class _FixedSoftmax(nn.Softmax):
    """Without a gradient through the sum that it divides by."""

    def forward(self, x):
        return super().forward(x).detach() * (1 + x - x.detach())


def run_without_sums(msa: nn.Module, x: torch.Tensor, case: dict) -> Results:
    """As :func:`run_attention`, but no gradient through a softmax's sum.

    What that does to a gradient is to take a mean off it: where all tokens are
    the same, or each sees one only, nothing is left.
    """
    msa = copy.deepcopy(msa)
    msa.w_msa.softmax.__class__ = _FixedSoftmax
    return run_attention(msa, x, case)


def run_fast_attention(msa: nn.Module, x: torch.Tensor, case: dict) -> Results:
    """As :func:`run_attention`, with the fast one in its place."""
    from repa_mm.faster import fast_window_attention

    return run_attention(fast_window_attention(copy.deepcopy(msa)), x, case)


class Check(NamedTuple):
    """A computation, its reference, and what it is tried with."""

    fields: dict
    make: Callable[[dict], tuple[nn.Module, torch.Tensor]]
    run: Callable[[nn.Module, torch.Tensor, dict], Results]
    reference: Callable[[nn.Module, torch.Tensor, dict], Results]
    terms: Callable[[nn.Module, torch.Tensor, dict], Results] = lambda *_: {}


def _ffn_and_input(case):
    return make_ffn(case), make_input(case, case['length'], case['channels'])


def _attention_and_input(case):
    return make_attention(case), make_input(
        case, case['height'] * case['width'], case['heads'] * case['head_channels']
    )


CHECKS = {
    'merge': Check(MERGE, _ffn_and_input, run_merged, run_literal),
    'folded training': Check(
        FOLDED, _ffn_and_input, run_folded, run_training, run_without_statistics
    ),
    'folded training, few tokens': Check(
        FEW_TOKENS, _ffn_and_input, run_folded, run_training, run_without_statistics
    ),
    'window attention': Check(
        ATTENTION, _attention_and_input, run_fast_attention, run_attention, run_without_sums
    ),
}


def _rounded(x: torch.Tensor, eps: float, generator) -> torch.Tensor:
    noise = torch.rand(x.shape, generator=generator, dtype=torch.float64)
    return x * (1 + eps * (noise - 0.5))


def _round_outputs(module: nn.Module, eps: float, generator) -> None:
    """Have every layer of a module round its output."""
    for layer in module.modules():
        if not list(layer.children()):
            layer.register_forward_hook(lambda layer, args, y: _rounded(y, eps, generator))


def _in(dtype: torch.dtype, run, module, x, case) -> Results:
    return run(copy.deepcopy(module).to(dtype), _with_layout(x.to(dtype), case['layout']), case)


def _roundings(check: Check, module, x, case, exact: Results) -> Results:
    """What one rounding is of each result, see the module's docstring."""
    dtype = DTYPES[case['dtype']]
    eps = torch.finfo(dtype).eps
    # The reference's own error in float64 is that in float32, scaled.
    lower = torch.float32 if dtype is torch.float64 else dtype
    found = _in(lower, check.reference, module, x, case)
    if not all(v.isfinite().all() for v in found.values()):
        raise OverflowError
    scale = eps / torch.finfo(lower).eps
    one = {
        k: torch.maximum(eps * largest(v), scale * largest(found[k].double() - v))
        for k, v in exact.items()
    }
    for k, v in check.terms(module, x, case).items():
        if k in one:
            one[k] = torch.maximum(one[k], eps * largest(v))
    # To be seen above the rounding errors of float64.
    step = max(eps, 2.0**-40)
    generator = torch.Generator().manual_seed(case['seed'] + 2)
    moved = copy.deepcopy(module)
    with torch.no_grad():
        for tensor in (*moved.parameters(), *moved.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(_rounded(tensor, step, generator))
    _round_outputs(moved, step, generator)
    moved = check.reference(moved, _rounded(x, step, generator), case)
    return {k: torch.maximum(v, eps / step * largest(moved[k] - exact[k])) for k, v in one.items()}


def largest(x: torch.Tensor) -> torch.Tensor:
    """The largest absolute value of a tensor; 0 for an empty one."""
    return x.abs().max() if x.numel() else x.new_zeros(())


def measure(check: Check, case: dict) -> dict[str, Error]:
    """The errors of a case, of each of its results.

    Raises:
        OverflowError: If the literal computation or the merged weights exceed
            the range of the dtype.
    """
    module, x = check.make(case)
    if not all(t.isfinite().all() for t in (x, *module.parameters(), *module.buffers())):
        raise OverflowError
    exact = check.reference(module, x, case)
    one = _roundings(check, module, x, case, exact)
    dtype = DTYPES[case['dtype']]
    try:
        found = _in(dtype, check.run, module, x, case)
    except ValueError as error:
        if 'exceed the range' in str(error):
            raise OverflowError from error
        raise
    assert found.keys() == exact.keys()
    errors = {}
    for key, value in exact.items():
        assert found[key].dtype == dtype and found[key].shape == value.shape
        difference = largest(found[key].double() - value).nan_to_num(math.inf)
        errors[key] = Error(
            *(
                (difference / scale.clamp_min(torch.finfo(dtype).tiny)).item()
                for scale in (largest(value), one[key])
            )
        )
    return errors
