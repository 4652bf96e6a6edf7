"""Narrower heads, against the literal equations and in the attention of all codebases."""

import copy
import itertools

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS

from benchmarks.even import even_sizes
from repa_mm.apis.features import tensors
from repa_mm.convert import Conversion
from repa_mm.convert.changed_config import converted_config
from repa_mm.convert.heads import HeadMoments, HeadWeights, Tokens, sample_windows
from repa_mm.faster.attention import FastShiftWindowMSA
from repa_mm.models.sites import attention_sites
from repa_mm.reparam import weight_and_bias
from tests.test_convert.even import narrowed

SWIN = dict(embed_dims=16, depths=[2, 2], num_heads=[2, 4])
WINDOWS = dict(window_size=4, out_indices=(0, 1))
STAGES = dict(SWIN, strides=(4, 2), **WINDOWS)
VIT = dict(embed_dims=32, num_layers=2, num_heads=2)
PATCHES = dict(img_size=64, patch_size=8)
TIMM = dict(model_name='vit_small_patch14_dinov2', embed_dim=32, depth=2, num_heads=2)
SCALED = dict(out_type='featmap', layer_scale_init_value=0.5)
# Backbones with known attention; images of odd sizes, so that Swins pad and mask.
CASES = {
    'MMPretrain Swin': dict(
        type='mmpretrain.SwinTransformer', arch=SWIN, img_size=72, pad_small_map=True, **WINDOWS
    ),
    'MMDetection Swin': dict(type='mmdet.SwinTransformer', **STAGES),
    'MMSegmentation Swin': dict(type='mmseg.SwinTransformer', **STAGES),
    'MMPretrain ViT': dict(
        type='mmpretrain.VisionTransformer',
        arch=dict(VIT, feedforward_channels=64),
        **PATCHES,
        **SCALED,
    ),
    'MMSegmentation ViT': dict(
        type='mmseg.VisionTransformer', **PATCHES, **VIT, out_indices=(0, 1)
    ),
    'timm DINOv2': dict(type='mmpretrain.TIMMBackbone', **PATCHES, **TIMM, init_values=0.5),
}


@pytest.fixture
def pretrained(randomize):
    def build(case, **kwargs):
        model = randomize(MODELS.build(dict(copy.deepcopy(CASES[case]), **kwargs)))
        model.eval()
        size = (72, 56) if 'Swin' in case else (64, 64)
        return model, [torch.randn(2, 3, *size) for _ in range(3)]

    return build


def outputs(model, x):
    with torch.no_grad():
        return tensors(model(x))


def largest(model):
    return max(float(p.detach().abs().max()) for p in model.parameters())


def from_config(given, model, narrow, report, x):
    """A model of the converted config, which computes what the narrow model does."""
    config = converted_config(Config(dict(model=given)), model, report.sizes)
    built = MODELS.build(config.model)
    built.load_state_dict(narrow.state_dict())
    built.eval()
    for a, b in zip(outputs(built, x), outputs(narrow, x)):
        assert torch.allclose(a, b, atol=1e-5)
    return built


def weights(num_heads=2, dims=6, channels=10):
    rows = num_heads * dims
    sizes = (3 * rows, channels), (3 * rows,), (channels, rows), (channels,)
    return HeadWeights(*(torch.randn(size, dtype=torch.float64) for size in sizes))


def queries_and_keys(heads, x):
    """Queries and centred keys (h, n, N, r) of tokens (n, N, C)."""
    (w_q, w_k, _), (b_q, _, _) = heads.split(2)
    q = torch.einsum('hrc,nmc->hnmr', w_q, x) + b_q[:, None, None]
    return q, torch.einsum('hrc,nmc->hnmr', w_k, x - x.mean(1, keepdim=True))


@torch.no_grad()
def test_logits_of_low_rank_are_the_best_ones():
    """The mean square error over queries and centred keys is what the singular values leave out."""
    torch.manual_seed(0)
    x = torch.randn(40, 9, 10, dtype=torch.float64) @ torch.randn(10, 10, dtype=torch.float64)
    x += 3
    heads = weights()
    moments = HeadMoments(heads, 2, 0.4, [Tokens(x, x)])
    q, k = (values.flatten(1, 2) for values in queries_and_keys(heads, x))
    whole = (q @ k.mT).square().mean((1, 2))
    for rank in (1, 3, 5):
        narrow, _ = moments.fit(rank, 6)
        p, r = (values.flatten(1, 2) for values in queries_and_keys(narrow, x))
        error = (q @ k.mT - p @ r.mT).square().mean((1, 2))
        left = moments.sizes[:, rank:].square().sum(1)
        assert torch.allclose(error, left, rtol=1e-8) and (error < whole).all()
        assert float(moments.qk[rank:].sum()) == pytest.approx(float(left.sum() / whole.sum()))


@torch.no_grad()
def test_all_dimensions_are_exact():
    x = torch.randn(5, 9, 10, dtype=torch.float64)
    heads, tokens = weights(), Tokens(x, x)
    narrow, unexplained = HeadMoments(heads, 2, 0.4, [tokens]).fit(6, 6)
    assert torch.allclose(narrow.w_out, heads.w_out) and abs(unexplained) < 1e-12
    # Of q·k that has three dimensions, and values that have two, nothing is lost.
    w, b = heads.split(2)
    w[0][:, 3:] = w[0][:, :3]
    b[0][:, 3:] = b[0][:, :3]
    w[2][:, 2:] = w[2][:, :2].repeat(1, 2, 1)
    b[2][:, 2:] = b[2][:, :2].repeat(1, 2)
    moments = HeadMoments(heads, 2, 0.4, [tokens])
    narrow, unexplained = moments.fit(3, 2)
    assert abs(unexplained) < 1e-10
    (q, k), (p, r) = (queries_and_keys(h, x) for h in (heads, narrow))
    assert torch.allclose(q @ k.mT, p @ r.mT, atol=1e-6)
    assert max(moments.qk[3:].sum(), moments.v[2:].sum()) < 1e-8


@torch.no_grad()
def test_the_projection_is_the_ridge_regression():
    torch.manual_seed(1)
    drawn = [Tokens(x, x) for x in torch.randn(3, 20, 9, 10, dtype=torch.float64)]
    heads, gamma = weights(), torch.rand(10).double() + 0.1
    moments = HeadMoments(heads, 2, 0.4, drawn, gamma)
    narrow, unexplained = moments.fit(4, 3)
    columns = [
        [x.transpose(0, 1).flatten(1) for x in (h.outputs(t, 2, 0.4)[2] for t in drawn)]
        for h in (narrow, heads)
    ]
    found, target = torch.cat(columns[0]), torch.cat(columns[1]) @ heads.w_out.t()
    error = found @ narrow.w_out.t() + narrow.b_out - heads.b_out - target
    variance = (target - target.mean(0)).square().sum()
    assert float(error.square().sum() / variance) == pytest.approx(unexplained)
    assert error.mean(0).abs().max() < 1e-10
    # Not worse than the directions alone.
    moments.fit_projection = lambda weights: (weights, None)
    first, _ = moments.fit(4, 3)
    rest = found @ first.w_out.t() - target
    assert (rest - rest.mean(0)).square().sum() > error.square().sum()


@torch.no_grad()
def test_tokens_of_windows():
    """Padding is no query, and keys are centred over what a query sees of a shifted window."""
    attention = FastShiftWindowMSA(
        8, num_heads=2, window_size=4, shift_size=2, pad_small_map=True
    ).eval()
    torch.nn.init.normal_(attention.w_msa.relative_position_bias_table)
    x, hw = torch.randn(2, 7 * 6, 8) + 5, (7, 6)
    generator = torch.Generator().manual_seed(0)
    tokens = sample_windows(attention, 10000, generator, x, hw)
    assert tokens.valid.sum() == 2 * 7 * 6 and not tokens.keys[~tokens.valid].any()
    w_msa = attention.w_msa
    heads = HeadWeights(*weight_and_bias(w_msa.qkv), *weight_and_bias(w_msa.proj))
    _, k, o, _ = heads.outputs(tokens, 2, w_msa.scale)
    # The outputs are those of the module, in another order.
    found = o.transpose(0, 1).flatten(1) @ w_msa.proj.weight.t() + w_msa.proj.bias
    expected = attention(x, hw).flatten(0, 1)
    distance = torch.cdist(found.double(), expected.double())
    assert distance.min(0).values.max() < 1e-5 and distance.min(1).values.max() < 1e-5
    # Keys that differ between the regions of a window alone matter to no query.
    for window in range(len(tokens.keys)):
        groups = tokens.visible[window] * tokens.valid[window][:, None]
        for row in groups.unique(dim=0):
            seen = row.bool() & tokens.valid[window]
            if seen.any():
                index = tokens.valid.flatten().cumsum(0).view_as(tokens.valid)[window][seen] - 1
                assert k[:, index].mean(1).abs().max() < 1e-5


@pytest.mark.parametrize('case, v', [*zip(CASES, itertools.cycle([0.5, 1.0]))])
def test_every_attention(case, v, pretrained):
    """Of q·k half, of values half or all: of other widths than each other."""
    model, images = pretrained(case)
    heads = attention_sites(model)
    dims = [site.parts().dims for site in heads]
    half = 4 * round(dims[0][0] / 8)
    before = outputs(model, images[0])
    narrow, report = narrowed(model, images, qk=0.5, v=v, held_out=images[:1])
    sizes = [site.parts().dims for site in attention_sites(narrow)]
    assert sizes == [(half, d if v == 1 else half) for d, _ in dims]
    assert max(report.differences) < 0.3
    # No weight is much larger than it was, in any attention.
    for site, old in zip(attention_sites(narrow), heads):
        for new, given in zip(site.parts()[1:3], old.parts()[1:3]):
            assert new.weight.abs().max() < 3 * given.weight.abs().max()
            assert new.bias.abs().max() < 3 * largest(model)
    assert [row.after for row in report.blocks] == sizes
    # It is what a model of its config computes, trains, and is as it was in eval mode.
    again = from_config(CASES[case], model, narrow, report, images[0])
    with_gradients = tensors(again(images[0]))
    for a, b in zip(with_gradients, outputs(narrow, images[0])):
        assert torch.allclose(a, b, atol=1e-4 * float(b.abs().max()))
    sum(x.square().sum() for x in with_gradients).backward()
    grads = [site.parts().qkv.weight.grad for site in attention_sites(again)]
    assert all(grad is not None and grad.isfinite().all() and grad.any() for grad in grads)
    assert all(map(torch.equal, outputs(model, images[0]), before))  # the original is as it was


def nearly_constant(kind, x):
    """Heads (two, with 6 dimensions each) of which the first one hardly tells tokens apart."""
    heads = weights()
    (w_q, w_k, w_v), (b_q, _, b_v) = heads.split(2)
    if kind == 'values':
        w_v[0] *= 1e-7
    elif kind == 'keys':
        w_k[0] *= 1e-7
        w_k[0] += torch.randn(6, 1)  # of the constant channel
    elif kind == 'queries':
        w_q[0] *= 1e-7
    elif kind == 'class token':
        direction = torch.nn.functional.normalize(w_k[0] @ x[0, 0].double(), dim=0)
        b_q[0] = 100 * direction
    else:  # all is zero
        w_q[0], w_k[0], w_v[0], b_q[0], b_v[0] = [torch.zeros(1)] * 5
    return heads


KINDS = ['values', 'keys', 'queries', 'class token', 'zero']


@torch.no_grad()
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('number', [1, 40])  # of 3 tokens, fewer than dimensions, and of 9
@pytest.mark.parametrize('kind', KINDS)
def test_nearly_constant_heads(kind, number, dtype):
    """Their rounding noise is not scaled up: what is fitted holds elsewhere and in bfloat16."""
    x = torch.randn(number, 9 if number > 1 else 3, 10)
    x[..., 0], x[:, 0] = 4, 4 * torch.randn(10)
    x = x.to(dtype)
    heads = nearly_constant(kind, x)
    moments = HeadMoments(heads, 2, 0.4, [Tokens(i, i) for i in x.split(10)])
    if number > 1:
        assert moments.constant == (kind in ('values', 'class token', 'zero'))
    other = torch.randn(30, 20, 10)
    other[..., 0] = 4
    expected = run(heads, other)
    for sizes in ((3, 3), (2, 6), (6, 2)):
        narrow, unexplained = moments.fit(*sizes)
        assert all(w.isfinite().all() for w in narrow) and -1e-6 < unexplained < 1
        assert narrow.w_qkv.abs().max() < 3 * heads.w_qkv.abs().max()
        assert narrow.w_out.abs().max() < 4 * heads.w_out.abs().max()
        assert narrow.b_out.abs().max() < 3 * run(heads, x.float()).abs().max()
        found = run(narrow, other)
        rounded = run(HeadWeights(*(w.bfloat16().double() for w in narrow)), other.bfloat16())
        size = expected.square().mean().sqrt()
        assert (found - expected).square().mean().sqrt() < 1.5 * size
        if kind != 'class token':  # whose logits of hundreds bfloat16 rounds in the original, too
            assert (rounded - found).square().mean().sqrt() < 0.1 * size


def run(heads, x):
    found = heads.outputs(Tokens(x, x), 2, 0.4)[2].transpose(0, 1).flatten(1).double()
    return found @ heads.w_out.t() + heads.b_out


def test_a_trained_swin_whose_last_stage_is_nearly_constant(pretrained):
    """As after training on small images: maps of one window, whose tokens are nearly the same."""
    model, images = pretrained('MMDetection Swin')
    with torch.no_grad():
        for site in attention_sites(model)[2:]:  # of the last stage
            heads = site.parts()
            heads.qkv.weight[-32:] *= 1e-6  # values
            heads.qkv.weight[32:64] *= 1e-3  # keys
    narrow, report = narrowed(model, images, qk=0.5, v=0.5)
    assert str(report).count('the output of 4 heads is nearly constant') == 2
    assert largest(narrow) < 2 * largest(model)
    for x in (images[0], torch.randn(2, 3, 144, 112)):
        for a, b in zip(outputs(narrow, x), outputs(model, x)):
            assert (a - b).norm() < 0.1 * b.norm()


NO_BIAS = {
    'MMDetection Swin': dict(qkv_bias=False),
    'MMPretrain ViT': dict(qkv_bias=False),
    'MMSegmentation ViT': {},
    'timm DINOv2': dict(qkv_bias=False, proj_bias=False),
}


@pytest.mark.parametrize('case', NO_BIAS)
@pytest.mark.parametrize('last', [False, True])
def test_parts_that_stay_are_not_in_the_config(case, last, pretrained):
    # A rebuilt part has biases and names that the original lacks.
    model, images = pretrained(case, **NO_BIAS[case])
    conversion = Conversion(model, images)
    sizes = even_sizes(conversion)
    name = list(sizes)[-1]
    if last:
        sizes[name] = (sizes[name][0] // 2,)
    narrow, report = conversion.fit(sizes)
    assert len(report.sizes) < len(report.blocks)
    from_config(dict(CASES[case], **NO_BIAS[case]), model, narrow, report, images[0])


def test_budget(pretrained):
    model, images = pretrained('MMPretrain ViT')
    conversion, changes = Conversion(model, images), []
    for budget in (0.8, 0.4):
        _, report = conversion.fit(conversion.sizes(budget), images[:1])
        assert 0.9 * budget < report.fraction <= budget
        changes.append(sum(report.differences))
    assert changes[0] < changes[1]
    with pytest.warns(UserWarning, match=r'take 0\.\d+ of .*budget is 0.01'):
        assert min(conversion.sizes(0.01).values()) == (2,)


def test_sizes_of_a_budget_do_not_depend_on_the_order_of_images(pretrained):
    model, _ = pretrained('MMPretrain ViT')
    images = [torch.randn(1, 3, 64, 64) * (4 if i < 8 else 0.25) for i in range(16)]
    found = [
        [size for sizes in Conversion(model, batches).sizes(0.4).values() for size in sizes]
        for batches in (images, images[::-1])
    ]
    assert all(abs(a - b) <= 0.06 * a for a, b in zip(*found))


def test_multiply_adds_are_counted_at_full_size(pretrained):
    """On a larger map, the attention of a ViT takes a larger share."""
    model, images = pretrained('MMPretrain ViT')
    large = [torch.randn(1, 3, 160, 96)]
    crops, full = (Conversion(model, images, full_size=x) for x in ([], large))
    tokens, channels = 20 * 12 + 1, 32
    for name, part in full.parts.items():
        channel = 2 * channels if len(part.sizes) == 1 else 2 * (2 * channels + tokens)
        assert full.costs[name] == (tokens * channel,) * len(part.sizes)

    def macs(sizes):
        return sum(c * n for name in sizes for c, n in zip(full.costs[name], sizes[name]))

    whole = macs({name: part.sizes for name, part in full.parts.items()})
    assert 0.36 < macs(full.sizes(0.4)) / whole <= 0.4
    assert macs(crops.sizes(0.4)) / whole != pytest.approx(0.4, abs=0.01)
