"""convert_pretrained in backbones of the three packages."""

import copy

import pytest
import torch
import torch.nn as nn
from mmpretrain.models import VisionTransformer
from torch.utils.flop_counter import FlopCounterMode

import repa_mm
from benchmarks.even import even_sizes
from repa_mm.apis.features import tensors
from repa_mm.convert import Conversion
from repa_mm.convert.conversion import find_parts
from repa_mm.convert.conversion_report import Clock
from repa_mm.convert.parts import PretrainedFFN
from repa_mm.convert.regression import FittedFFN
from repa_mm.faster import rewrite_
from repa_mm.models import FAMILIES, MLPs, add_structures_
from repa_mm.models.sites import FFNSite, ffn_sites
from repa_mm.models.structures import Widths
from tests.test_convert.even import narrowed
from tests.test_models.test_sites import CONVERTIBLE, NARROWED, build

ARCH = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=64)
VIT = 'DINOv2'  # a ViT with layer scale
# One of each kind of block that is treated in its own way, and what it has changed.
CASES = {
    'ViT': dict(out_type='raw'),
    VIT: {},
    'DeiT III': {},
    'BEiT': {},
    'Swin': dict(out_indices=(2, 3)),
    'TNT': {},
    'MLP-Mixer': {},
    'PoolFormer': {},
    'Swin V2': {},
    'ConvNeXt': dict(layer_scale_init_value=0.5, gap_before_final_norm=False),
    'timm DINOv2': {},
    'timm DINOv3': {},
    'SegFormer': {},
    'PVT v2': {},
    'MMDetection Swin': {},
    'MMSegmentation ViT': {},
}


def images(n=3, size=64):
    return [torch.randn(8, 3, size, size) for _ in range(n)]


def outputs(model, x):
    return tensors(model(x))


def pretrained(case, randomize):
    package, name, kwargs, number = {**CONVERTIBLE, **NARROWED}[case]
    model = randomize(build(package, name, dict(kwargs, **CASES[case])))
    model.eval()  # on a line of its own: of some backbones it returns None
    return model, number


def widths(model):
    return [len(site.modules().fc1.bias) for site in ffn_sites(model)]


@pytest.mark.parametrize('case', CASES)
@torch.no_grad()
def test_every_block(case, randomize):
    model, number = pretrained(case, randomize)
    x = torch.randn(1, 3, 64, 64)
    expected = outputs(model, x)
    conversion = Conversion(model, images(2), ['ffn'], forward=outputs)
    same, report = conversion.fit(even_sizes(conversion))
    assert all(row.unexplained == 0 for row in report.blocks)
    assert all(map(torch.equal, outputs(same, x), expected))
    narrow, report = conversion.fit(even_sizes(conversion, 0.5), held_out=[x])
    assert len(report.blocks) == number and max(report.differences) < 0.5
    largest = [max(p.abs().max() for p in m.parameters()) for m in (narrow, model)]
    assert largest[0] < 3 * largest[1]
    assert widths(narrow) == [row.after[0] for row in report.blocks]
    assert [2 * width for width in widths(narrow)] == widths(model)
    assert {type(m) for m in narrow.modules()} == {type(m) for m in model.modules()}
    assert all(map(torch.equal, outputs(model, x), expected))  # the original is as it was
    # Of ordinary classes with other widths: what was saved is loaded by such a model.
    again = copy.deepcopy(model)
    Widths(widths(narrow)).put_(again)
    found = again.load_state_dict(narrow.state_dict(), strict=False)
    # Tables of Swin V2, which MMPretrain computes and does not save.
    assert not found.unexpected_keys and all('.relative_' in key for key in found.missing_keys)
    again.eval()
    assert all(map(torch.equal, outputs(again, x), outputs(narrow, x)))


def test_faster_parts_that_compute_something_else_are_refused(randomize, monkeypatch):
    def spoiled(model, stage):
        model.stages[1].blocks[0].attn.w_msa.scale *= 2
        return rewrite_(model, stage)

    monkeypatch.setattr('repa_mm.convert.conversion.rewrite_', spoiled)
    message = "a faster model computes .*; 'stages.1.blocks.0.attn' differs first .Fast"
    with pytest.raises(ValueError, match=message):
        Conversion(pretrained('MMDetection Swin', randomize)[0], images(1), forward=outputs)


@torch.no_grad()
def test_a_model_that_does_not_compute_what_was_fitted_is_refused(randomize, monkeypatch):
    put = FFNSite.set_weights

    def spoiled(site, w_in, *others):
        put(site, w_in.flip(1), *others)

    monkeypatch.setattr(FFNSite, 'set_weights', spoiled)
    model, _ = pretrained(VIT, randomize)
    for options in (dict(budget=0.5), dict(idle_ratio=0.75)):
        with pytest.raises(ValueError, match='does not compute what was fitted: .*differ by'):
            repa_mm.convert_pretrained(model, images(), forward=outputs, **options)


def test_what_the_report_says(randomize):
    model, _ = pretrained(VIT, randomize)
    x, told = images(), []
    _, report = narrowed(
        model, iter(x), 0.375, held_out=x[:1], progress=lambda *row: told.append(row)
    )
    rows, numbers, seconds = map(list, zip(*told))
    assert numbers == [2, 2] and seconds[0] > 0 == seconds[1]
    assert rows == report.blocks and [row.name for row in rows] == ['layers.0', 'layers.1']
    assert 0 < report.differences[0] < 0.15
    lines = [line.split() for line in str(report).splitlines()]
    for row, line in zip(rows, lines[1:]):
        assert 0 < row.unexplained < 0.5 and line[:3] == [row.name, '24', '64']
        assert float(line[4]) == pytest.approx(0.375 * float(line[5]), abs=1e-3)
    assert lines[3][0] == 'all' and 'held-out images' in ' '.join(lines[4])
    idle = add_structures_(copy.deepcopy(model), [dict(type='ChannelIdle')])
    with pytest.raises(ValueError, match="'layers.0': it has a channel-idle FFN instead of an "):
        repa_mm.convert_pretrained(idle, x, parts=['ffn'])


def test_the_time_left_is_that_of_what_is_left(monkeypatch):
    """Of fits as long as the last one of their kind, by its parameters, and of passes to each."""
    parts = dict(a=nn.Linear(9, 1), b=nn.Conv2d(1, 1, 1), c=nn.Linear(99, 1), d=nn.Linear(99, 1))
    times = iter([0, 1, 11, 13, 17, 20, 40])
    monkeypatch.setattr('time.monotonic', lambda: next(times))
    clock, found = Clock(parts), []
    for name in 'abc':
        clock.start()
        found.append(clock.left(name))
    assert found == [3 * 1 + 2 + 2 * 100, 2 * 2 + 2 * 100, 3 + 20]


@pytest.fixture
def multiply_adds():
    """Counts all products of a model for an image, with those of attention."""
    enabled = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(False)  # also on CPUs

    def count(model, x):
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), counter:
            model(x)
        return counter.get_total_flops() / 2 / len(x)

    yield count
    torch.backends.cuda.enable_flash_sdp(enabled)


@pytest.mark.parametrize(
    'case, heads',
    [(VIT, True), ('Swin', True), ('SegFormer', False), ('TNT', None), ('Swin', None)],
)
def test_multiply_adds_are_those_of_the_models(case, heads, multiply_adds, randomize):
    """In windows with padding, in patches of patches, convolutions and the matrix of idle ones."""
    (model, _), x = pretrained(case, randomize), images(2)
    if heads is None:
        narrow, report = repa_mm.convert_pretrained(model, x, idle_ratio=0.75, forward=outputs)
        narrow = repa_mm.reparameterize(narrow)
        assert report.fraction == pytest.approx(0.25 + 1 / 8)  # A of H = 4 C channels, and C^2
    else:
        narrow, report = narrowed(model, x, 0.5, *2 * [0.5 if heads else 1.0], forward=outputs)
    saved = multiply_adds(model, x[0]) - multiply_adds(narrow, x[0])
    after, before = report.gmacs
    assert 1e9 * (before - after) == pytest.approx(saved, rel=1e-6)


def test_drop_path_scale_and_mode_are_kept(randomize):
    model = randomize(VisionTransformer(ARCH, 64, drop_path_rate=0.2, layer_scale_init_value=0.5))
    with torch.no_grad():
        model.layers[1].ffn.gamma2.weight[0] = 0  # no output weight gives this channel anything
    model.train()
    model.layers[0].eval()
    converted, report = narrowed(model, images(), 0.375, held_out=images(1))
    assert report.differences[0] < 0.2
    ffn, old = converted.layers[1].ffn, model.layers[1].ffn
    assert torch.equal(ffn.gamma2.weight[1:], old.gamma2.weight[1:]) and ffn.gamma2.weight[0] != 0
    assert ffn.layers[1].weight.abs().max() < 100
    assert ffn.dropout_layer.drop_prob == 0.2
    assert ffn.training and model.layers[1].ffn.training and not converted.layers[0].training
    sum(y.square().mean() for y in outputs(converted, images(1)[0])).backward()
    assert ffn.layers[0][0].weight.grad.isfinite().all() and ffn.gamma2.weight.grad is not None


def test_what_cannot_be_done(randomize):
    model, _ = pretrained(VIT, randomize)
    x = images(1)
    for kwargs, message in (
        (dict(batches=[]), 'no image'),
        (dict(budget=1.5), 'a share in .*1.5'),
        (dict(parts=['ffns']), "parts must be some of 'ffn'.*ffns"),
        (dict(parts=[]), "parts must be some of 'ffn'"),
        (dict(forward=lambda model, x: [model(x)[0].argmax()]), 'no tensor of floats'),
        (dict(where='neck'), "VisionTransformer has no block in its 'neck' of a family"),
        (dict(idle_ratio=0.2), 'hidden channels would be idle.*a larger idle ratio'),
        (dict(idle_ratio=0.75, parts=['ffn']), 'leave parts out'),
        (dict(idle_ratio=0.75, budget=0.5), 'leave budget out'),
    ):
        with pytest.raises(ValueError, match=message):
            repa_mm.convert_pretrained(model, **{'batches': x, **kwargs})
    segformer, _ = pretrained('SegFormer', randomize)
    assert 'depthwise convolution' in find_parts(segformer, idle_ratio=0.75)[1]['layers.0.1.0']
    hooked = copy.deepcopy(model)
    for module in (hooked.layers[0].ffn, hooked.layers[0].attn.qkv, hooked.layers[1].attn):
        module.register_forward_hook(lambda *args: None)
    kept, skipped = find_parts(hooked)
    assert list(kept) == ['layers.1'] and all('hooks' in why for why in skipped.values())
    model.layers[0].register_forward_hook(lambda m, i, o: o)  # the block's stays
    converted, _ = narrowed(model, [torch.ones(1, 3, 64, 64)], 0.375)  # 17 tokens, 24 channels
    assert outputs(converted, x[0])[0].isfinite().all()
    model.layers[1].ffn.layers[1].bias.data[0] = torch.nan
    with pytest.raises(ValueError, match="activations of 'layers.1' are not finite"):
        repa_mm.convert_pretrained(model, x)


def test_wrapped_models_and_other_types(randomize):
    model, _ = pretrained(VIT, randomize)
    x = images()
    expected, report = narrowed(model, x, 0.375)
    converted, _ = narrowed(nn.DataParallel(copy.deepcopy(model)), x, 0.375)
    for key, value in expected.state_dict().items():
        assert torch.equal(converted.state_dict()[key], value)
    converted, rows = narrowed(copy.deepcopy(model).bfloat16(), [v.bfloat16() for v in x], 0.375)
    assert {p.dtype for p in converted.parameters()} == {torch.bfloat16}
    swin = pretrained('Swin', randomize)[0].bfloat16()
    assert narrowed(swin, [v.bfloat16() for v in x], 0.375)[1].fraction < 0.5
    for row, known in zip(rows.blocks, report.blocks):
        assert row.unexplained == pytest.approx(known.unexplained, rel=0.3, abs=0.02)


@torch.no_grad()
def test_patches_are_what_the_depthwise_convolution_sees(randomize):
    """Also at the border, where the hidden channels are padded with zeros and not the tokens."""
    model, _ = pretrained('SegFormer', randomize)
    site = ffn_sites(model)[1]
    part, x, shape = PretrainedFFN(site), torch.randn(2, 6 * 5, 8), (6, 5)
    expected = site.block.ffn(site.block.norm2(x), shape, identity=x)
    assert torch.allclose(part.original(x, shape), expected, atol=1e-6)
    whole = FittedFFN.from_form(part.ffn, part.conv)
    assert torch.allclose(x + whole(part.inputs(x, shape)), expected, atol=1e-6)
    # With a channel, its filter goes.
    kept = torch.arange(0, 32, 3)
    site.set_weights(*whole.only(kept).weights.values())
    rest = whole.features(part.inputs(x, shape))[..., kept] @ whole.w_out[:, kept].t().float()
    found = site.block.ffn(part.ffn.norm1(x), shape, identity=torch.zeros(1))
    assert torch.allclose(found, rest + whole.b.float(), atol=1e-6)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class AnyBlock(nn.Module):
    """A block of a user's own, which ends as ``end`` says."""

    def __init__(self, end):
        super().__init__()
        self.norm, self.mlp, self.end = nn.LayerNorm(16), Mlp(), end
        self.gamma, self.mix = nn.Parameter(torch.rand(16) + 0.5), nn.Linear(16, 16)

    def forward(self, x):
        x = x + 0.3 * self.mix(x.flip(1))
        return self.end(self, x, self.mlp(self.norm(x)))


def times(gamma, f):
    return f if gamma is None else gamma * f


PLAIN, SCALED = MLPs('norm', 'mlp'), MLPs('norm', 'mlp', scale='gamma')
ENDS = {
    'x + f': (PLAIN, True, lambda block, x, f: x + f),
    'x + gamma f': (SCALED, True, lambda block, x, f: x + times(block.gamma, f)),
    'norm(x + f)': (PLAIN, True, lambda block, x, f: torch.tanh(x + f)),
    'f alone, without a norm': (MLPs('', 'mlp'), True, lambda block, x, f: block.mix(f)),
    'x + 4 f': (PLAIN, False, lambda block, x, f: x + 4 * f),
    'f': (PLAIN, False, lambda block, x, f: f),
    '2 x + f': (PLAIN, False, lambda block, x, f: 2 * x + f),
    'x + gamma f, gamma unknown': (PLAIN, False, lambda block, x, f: x + block.gamma * f),
}  # fmt: skip


@pytest.mark.parametrize('end', ENDS)
def test_blocks_that_use_their_ffn_otherwise_are_refused(end, monkeypatch, randomize):
    """The targets of the fits would be wrong."""
    family, is_right, function = ENDS[end]
    monkeypatch.setitem(FAMILIES, 'AnyBlock', family)
    model = randomize(nn.Sequential(AnyBlock(function), AnyBlock(function))).eval()
    x = [torch.randn(4, 30, 16) for _ in range(4)]
    if is_right:
        _, report = narrowed(model, x[:3], 0.8, held_out=x[3:])
        assert report.differences[0] < 0.1
    else:
        with pytest.raises(ValueError, match="'0', a AnyBlock, is not x \\+ ffn"):
            narrowed(model, x, 0.8)
