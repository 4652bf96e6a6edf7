"""Passes that meet at every FFN."""

import gc
import weakref

import pytest
import torch
from mmpretrain.models import VisionTransformer

import repa_mm
from benchmarks.even import even_sizes
from repa_mm.convert import Conversion
from repa_mm.convert.conversion import find_parts
from repa_mm.reparam.autograd import autocast_dtype
from tests.test_convert.even import narrowed

VIT = dict(embed_dims=16, num_layers=3, num_heads=2, feedforward_channels=64)


@pytest.fixture
def vit(randomize):
    model = randomize(VisionTransformer(VIT, img_size=32, patch_size=8))
    model.eval()
    return model


def images(n=3):
    return list(torch.randn(n, 4, 3, 32, 32))


def tokens_of(model, x):
    return model.patch_embed(x)[0]


def state(model):
    """What a conversion must leave as it was."""
    return {n: (type(m), m.training, len(m._forward_hooks)) for n, m in model.named_modules()}


def as_class(layer, forward):
    """A block of the same name with another forward pass."""
    layer.__class__ = type('TransformerEncoderLayer', (type(layer),), dict(forward=forward))


def usual(layer, x):
    x = x + layer.attn(layer.ln1(x))
    return layer.ffn(layer.ln2(x), identity=x)


def in_place_afterwards(layer, x):
    x = usual(layer, x)
    x += 0.5 * layer.attn(layer.ln1(x))
    return x


def in_place_before(layer, x):
    x += layer.attn(layer.ln1(x))
    return layer.ffn(layer.ln2(x), identity=x).clone()


@pytest.mark.parametrize('forward', [in_place_afterwards, in_place_before])
def test_blocks_that_change_tensors_in_place(forward, vit):
    for layer in vit.layers:
        as_class(layer, forward)
    x = images()
    with torch.no_grad():
        expected = vit(x[0])[0]
    _, report = narrowed(vit, x, 0.8, held_out=x[:1])
    assert report.differences[0] < 0.05
    with torch.no_grad():
        assert torch.equal(vit(x[0])[0], expected)


def test_nothing_is_assumed_of_what_lies_between(vit):
    """Connections past blocks, images of other sizes that go other ways."""

    def forward(model, batch):
        tokens = tokens_of(model, batch)
        first = model.layers[0](tokens)
        second = model.layers[1](first if batch.shape[-1] < 32 else first + tokens)
        return model.layers[2](first + 0.3 * second.flip(1))

    x = [*images(2), torch.randn(4, 3, 24, 24), torch.randn(4, 3, 16, 32)]
    conversion = Conversion(vit, x, ['ffn'], forward=forward)
    sizes = dict(even_sizes(conversion, ffn=0.4), **{'layers.0': (64,)})
    converted, report = conversion.fit(sizes)
    assert [row.name for row in report.blocks] == ['layers.0', 'layers.1', 'layers.2']

    # The third FFN by hand: what the original returned, given what the fitted second one returns.
    def run(model, batch):
        inputs = []
        handle = model.layers[2].ffn.register_forward_pre_hook(
            lambda m, args, kwargs: inputs.append(kwargs['identity']), with_kwargs=True
        )
        y = forward(model, batch)
        handle.remove()
        return inputs[0].flatten(0, 1).double(), y.flatten(0, 1).double()

    with torch.no_grad():
        pairs = [(run(vit, batch)[1], *run(converted, batch)) for batch in x]
    target, given, found = (torch.cat(values) for values in zip(*pairs))
    change = target - given
    left = (target - found).square().sum() / (change - change.mean(0)).square().sum()
    assert float(left) == pytest.approx(report.blocks[2].unexplained, rel=1e-3)


def twice(layer, x):
    x = usual(layer, x)
    return layer.ffn(layer.ln2(x), identity=x)


def post_norm(layer, x):
    x = x + layer.attn(layer.ln1(x))
    return layer.ln2(layer.ffn(x, identity=x))


def scored(layer, x):
    """As where tokens are pruned by the scores of an attention."""
    layer.score = x.std(dim=(1, 2), keepdim=True)
    return usual(layer, x)


def test_what_cannot_be_fitted_is_named(vit):
    def by_score(model, batch):
        first = model.layers[0](tokens_of(model, batch))
        return model.layers[2](model.layers[1](first * model.layers[0].score))

    def other_order(model, batch):
        first, second, third = model.layers if batch.shape[0] == 4 else model.layers[::-1]
        return third(second(first(tokens_of(model, batch))))

    def one_less(model, batch):
        first = model.layers[1](model.layers[0](tokens_of(model, batch)))
        return model.layers[2](first) if batch.shape[0] == 4 else first

    kind = type(vit.layers[0])
    x = [*images(), torch.randn(2, 3, 32, 32)]
    for layer_forward, forward, message in (
        (twice, None, "'layers.0' runs more than once"),
        (post_norm, None, "'layers.0', a TransformerEncoderLayer, does not use its FFN"),
        (scored, by_score, 'change by .* leaves something in the model'),
        (None, other_order, "the same blocks in the same order.*'layers.0', 'layers.2'"),
        (None, one_less, "the same blocks in the same order.*'layers.2', the end"),
    ):
        for layer in vit.layers:
            layer.__class__ = kind
            if layer_forward:
                as_class(layer, layer_forward)
        before = state(vit)
        with pytest.raises(ValueError, match=message):
            narrowed(vit, x[:-1] if layer_forward else x, 0.375, forward=forward)
        assert state(vit) == before


def test_blocks_that_a_pass_does_not_reach(vit):
    def shorter(model, batch):
        return model.layers[2](model.layers[0](tokens_of(model, batch)))

    narrow, report = narrowed(vit, images(), 0.375, forward=shorter)
    assert [block.name for block in report.blocks] == ['layers.0', 'layers.2']
    assert report.skipped == {'layers.1': 'the forward pass does not reach it'}
    assert str(report).endswith('not converted: layers.1: the forward pass does not reach it')
    assert [layer.ffn.feedforward_channels for layer in narrow.layers] == [24, 64, 24]
    with pytest.raises(ValueError, match="narrowed: 'layers.0': the forward pass does not reach"):
        narrowed(vit, images(), 0.375, forward=tokens_of)


def test_what_blocks_share_stays(vit):
    vit.layers[2].ffn, vit.layers[2].attn = vit.layers[0].ffn, vit.layers[1].attn
    _, report = repa_mm.convert_pretrained(vit, images(), budget=0.6)
    assert [block.name for block in report.blocks] == ['layers.0.attn', 'layers.1']
    assert list(report.skipped) == ['layers.1.attn', 'layers.2.attn', 'layers.0', 'layers.2']
    assert all('several blocks share it' in why for why in report.skipped.values())


def test_what_blocks_share_in_part_stays(vit):
    vit.layers[2].ffn.layers[1] = vit.layers[0].ffn.layers[1]
    vit.layers[1].attn.qkv = vit.layers[0].attn.qkv
    pretrained, skipped = find_parts(vit)
    assert [*pretrained] == ['layers.2.attn', 'layers.1']
    assert all('several blocks share it' in why for why in skipped.values())
    assert [*find_parts(vit, idle_ratio=0.75)[0]] == ['layers.1']


def test_an_error_in_a_pass_leaves_nothing(vit):
    alive = []

    def forward(model, batch):
        batch = batch.clone()
        alive.append(weakref.ref(batch))
        tokens = model.layers[1](model.layers[0](tokens_of(model, batch)))
        if len(alive) > 9:  # three plain passes, three that count, three teachers and students
            raise ZeroDivisionError('from the model itself')
        return model.layers[2](tokens) + batch.mean()

    before = state(vit)
    with pytest.raises(ZeroDivisionError) as caught:
        narrowed(vit, images(), 0.375, forward=forward)
    assert caught.traceback[-1].frame.code.raw is forward.__code__
    del caught  # has the batches
    gc.collect()
    assert len(alive) == 12 and not any(ref() is not None for ref in alive)
    assert state(vit) == before


@pytest.mark.parametrize('mode', [torch.inference_mode, torch.enable_grad])
def test_modes_of_a_pass_stay_in_it(mode, vit):
    x = images()
    expected, _ = narrowed(vit, x, 0.375)
    with torch.inference_mode():
        converted, _ = narrowed(vit, x, 0.375, forward=mode()(lambda m, x: m(x)))
    for key, value in expected.state_dict().items():
        assert torch.equal(converted.state_dict()[key], value)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    converted.train()
    converted(x[0])[0].square().mean().backward()
    assert converted.layers[0].ffn.layers[0][0].weight.grad.isfinite().all()


def test_the_fit_does_not_see_the_autocast_of_a_pass(vit):
    def forward(model, batch):
        with torch.autocast('cpu', torch.bfloat16):
            return model(batch)

    _, expected = narrowed(vit, images(), 0.375)
    _, report = narrowed(vit, images(), 0.375, forward=forward)
    for row, known in zip(report.blocks, expected.blocks):
        assert row.unexplained == pytest.approx(known.unexplained, rel=0.3, abs=0.02)
    assert autocast_dtype('cpu') is None
