"""convert_pretrained in backbones of the three packages."""

import copy
from math import nan

import pytest
import torch
from mmengine.registry import MODELS

import repa_mm
from repa_mm.fit.walk import BlockWalk
from repa_mm.models.surgery.idle import find_blocks
from repa_mm.reparam import ChannelIdleFFN
from tests.test_models.test_idle_channels import CONVERTIBLE, build, outputs


def images(n=3, size=64):
    return [torch.randn(8, 3, size, size) for _ in range(n)]


def pretrained(case, randomize):
    package, name, kwargs, number = CONVERTIBLE[case]
    model = randomize(build(package, name, kwargs))
    model.eval()  # on a line of its own: of some backbones it returns None
    return model, number


def forward_of(model):
    return lambda x: outputs(model, x)


@pytest.mark.parametrize('case', CONVERTIBLE)
@pytest.mark.parametrize('norm', ['keep', 'fold'])
def test_every_block(case, norm, randomize, relative_error):
    model, number = pretrained(case, randomize)
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = outputs(model, x)
    converted, report = repa_mm.convert_pretrained(
        model, images(), 0.0, norm, forward=forward_of(model)
    )
    assert all(row.unexplained < (1e-12 if norm == 'keep' else 0.5) for row in report.blocks)
    with torch.no_grad():
        for a, b in zip(outputs(converted, x), expected):
            assert norm == 'fold' or relative_error(a, b) < 1e-6
    converted, report = repa_mm.convert_pretrained(
        model, images(), 0.5, norm, forward=forward_of(model)
    )
    assert len(report.blocks) == number
    ffns = [m for m in converted.modules() if isinstance(m, ChannelIdleFFN)]
    assert [ffn.num_idle * 2 for ffn in ffns] == [ffn.feedforward_channels for ffn in ffns]
    with torch.no_grad():
        for a, b in zip(outputs(model, x), expected):  # the original is as it was
            assert torch.equal(a, b)
        converted.double()
        result = outputs(converted, x.double())
        for a, b in zip(outputs(repa_mm.reparameterize(converted), x.double()), result):
            assert relative_error(a, b) < 1e-10


VIT = 'DINOv2'


def test_in_place_and_what_the_report_says(randomize):
    model, _ = pretrained(VIT, randomize)
    x = images()
    rows = []
    copied, report = repa_mm.convert_pretrained(model, x, held_out=x[:1], progress=rows.append)
    assert rows == report.blocks and [row.name for row in rows] == ['layers.0', 'layers.1']
    converted, _ = repa_mm.convert_pretrained(model, lambda: iter(x), inplace=True)
    assert converted is model
    with torch.no_grad():
        assert torch.equal(outputs(copied, x[0])[0], outputs(model, x[0])[0])
    text = str(report)
    assert 'layers.1' in text and 'exact' in text and 'held-out images' in text
    assert 0 < report.differences[0] < 0.1
    for row in rows:
        assert 0 < row.unexplained < row.unexplained_affine < 1
        # 16 patches and the class token; A = H/4 = C, so that C x C is half of what is left.
        assert row.gmacs == pytest.approx(17 * 2 * 16 * 64 / 1e9)
        assert row.merged_gmacs == pytest.approx(17 * 3 * 16 * 16 / 1e9)


def test_one_budget_for_all_blocks(randomize):
    model, _ = pretrained('ViT', randomize)
    with torch.no_grad():  # the first FFN computes next to nothing
        model.layers[0].ffn.layers[1].weight *= 1e-3
    _, report = repa_mm.convert_pretrained(model, images(), 0.5, allocate='by_error')
    first, second = (block.idle_ratio for block in report.blocks)
    assert first > 0.6 > 0.4 > second >= 0.25
    assert 0.5 <= (first + second) / 2 < 0.55


@pytest.mark.parametrize('norm', ['keep', 'fold'])
@pytest.mark.parametrize('case', [VIT, 'BEiT', 'PoolFormer'])
def test_an_interrupted_conversion_goes_on(case, norm, randomize, tmp_path):
    model, _ = pretrained(case, randomize)
    x, state = images(), {}
    options = dict(idle_ratio=0.75, norm=norm, forward=forward_of(model))

    def stop(row):
        raise KeyboardInterrupt

    before = {n: type(m) for n, m in model.named_modules()}
    with pytest.raises(KeyboardInterrupt):
        repa_mm.convert_pretrained(model, x, resume=state, progress=stop, **options)
    assert {n: type(m) for n, m in model.named_modules()} == before
    # Nothing but tensors and numbers.
    torch.save(state, tmp_path / 'state')
    state = torch.load(tmp_path / 'state', weights_only=True)
    assert len([key for key in state if key in before]) == 1
    converted, report = repa_mm.convert_pretrained(model, x, resume=state, **options)
    whole, expected = repa_mm.convert_pretrained(model, x, **options)
    assert str(report) == str(expected)
    with torch.no_grad():
        for a, b in zip(outputs(converted, x[0]), outputs(whole, x[0])):
            assert torch.equal(a, b)
    state = torch.load(tmp_path / 'state', weights_only=True)
    with pytest.raises(ValueError, match='cannot resume: idle_ratio differ'):
        repa_mm.convert_pretrained(model, x, resume=state, **dict(options, idle_ratio=0.5))
    with pytest.raises(ValueError, match='conversion that is resumed'):
        repa_mm.convert_pretrained(model, images(), resume=state, **options)
    # Any weights count, not only those of the FFNs.
    with torch.no_grad():
        list(model.parameters())[-1][0] += 1
    with pytest.raises(ValueError, match='cannot resume: weights differ'):
        repa_mm.convert_pretrained(model, x, resume=state, **options)


def test_drop_path_scale_and_mode_are_kept(randomize):
    from mmpretrain.models import VisionTransformer

    arch = CONVERTIBLE[VIT][2]['arch']
    model = randomize(VisionTransformer(arch, 64, drop_path_rate=0.2, layer_scale_init_value=0.5))
    model.train()
    scale = model.layers[1].ffn.gamma2.weight.clone()
    for norm in ('keep', 'fold'):
        converted, _ = repa_mm.convert_pretrained(model, images(), norm=norm)
        ffn = converted.layers[1].ffn
        assert torch.equal(ffn.layer_scale, scale)
        assert ffn.dropout_layer.drop_prob == 0.2
        assert ffn.training and model.layers[1].ffn.training
        loss = sum(y.square().mean() for y in outputs(converted, images(1)[0]))
        loss.backward()
        assert ffn.fc1.weight.grad.isfinite().all() and ffn.layer_scale.grad is not None


def test_what_cannot_be_done(randomize):
    model, _ = pretrained(VIT, randomize)
    before = {n: type(m) for n, m in model.named_modules()}
    x = images(1)
    with pytest.raises(ValueError, match='no image'):
        repa_mm.convert_pretrained(model, [])
    with pytest.raises(ValueError, match='is an iterator'):
        repa_mm.convert_pretrained(model, iter(x))
    with pytest.raises(ValueError, match='batches must be a list of batches'):
        repa_mm.convert_pretrained(model, x[0])
    for option, value in (
        ('norm', 'none'), ('allocate', 'all'), ('select', 'first'), ('ridge', -1), ('ridge', nan),
        ('max_tokens', 0), ('idle_ratio', 1.5),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f'^{option} must be .*{value}'):
            repa_mm.convert_pretrained(model, x, **{option: value})
    with torch.no_grad():
        model.layers[1].ffn.layers[1].bias[0] = torch.nan
    with pytest.raises(ValueError, match="activations of 'layers.1' are not finite"):
        repa_mm.convert_pretrained(model, x)
    assert {n: type(m) for n, m in model.named_modules()} == before
    assert not model.layers[0]._forward_hooks and 'forward' not in model.layers[0].__dict__
    with torch.no_grad():
        model.layers[1].ffn.layers[1].bias[0] = 0
    converted, report = repa_mm.convert_pretrained(model, [torch.ones(1, 3, 64, 64)])
    assert '17 tokens for 33 unknowns per channel: give more images' in report.warnings[0]
    assert outputs(converted, x[0])[0].isfinite().all()
    with pytest.raises(ValueError, match='already'):
        repa_mm.convert_pretrained(converted, x)


def test_other_data_the_second_time(randomize):
    model, _ = pretrained('Swin', randomize)  # its stages lie apart
    with pytest.raises(ValueError, match='other data the second time'):
        repa_mm.convert_pretrained(model, lambda: iter(images(2)))


def test_blocks_that_cannot_be_converted_can_stay(randomize):
    from mmpretrain.models import VisionTransformer

    arch = CONVERTIBLE[VIT][2]['arch']
    layers = [dict(), dict(ffn_type='swiglu_fused')]
    model = randomize(VisionTransformer(arch, 64, layer_cfgs=layers))
    with pytest.raises(ValueError, match="'layers.1'.*SwiGLUFFNFused"):
        repa_mm.convert_pretrained(model, images())
    converted, report = repa_mm.convert_pretrained(model, images(), skip_unsupported=True)
    assert isinstance(converted.layers[0].ffn, ChannelIdleFFN)
    assert not isinstance(converted.layers[1].ffn, ChannelIdleFFN)
    assert list(report.skipped) == ['layers.1'] and 'SwiGLUFFNFused' in str(report)
    # A config says it, too.
    ratios = [block.idle_ratio for block in report.blocks] + [None]
    config = dict(type='mmpretrain.VisionTransformer', arch=arch, img_size=64, layer_cfgs=layers)
    built = MODELS.build(
        dict(
            type='IdleChannels', backbone=config, idle_ratio=ratios, norm_cfg=dict(type='keep'),
            fast_attention=False,
        )
    )  # fmt: skip
    built.load_state_dict(converted.state_dict())
    built.eval(), converted.eval()
    x = images(1)[0]
    with torch.no_grad():
        for a, b in zip(built(x), converted(x)):
            assert torch.equal(a, b)
    merged = repa_mm.reparameterize(built)
    with torch.no_grad():
        torch.testing.assert_close(merged(x), built(x), rtol=1e-4, atol=1e-5)


def test_blocks_can_be_left_out(randomize):
    model, _ = pretrained(VIT, randomize)
    converted, report = repa_mm.convert_pretrained(model, images(), [None, 0.5])
    assert not isinstance(converted.layers[0].ffn, ChannelIdleFFN)
    assert converted.layers[1].ffn.num_idle == 32
    assert report.skipped == {'layers.0': 'idle_ratio leaves it out'}
    with pytest.raises(ValueError, match='no block .* can become channel-idle.*leaves it out'):
        repa_mm.convert_pretrained(model, images(), [None, None])


def test_a_constant_image(randomize):
    """Every token of a model without position embeddings is the same: nothing can be fitted."""
    model, _ = pretrained('PoolFormer', randomize)
    x = [torch.full((1, 3, 256, 256), 0.7)]
    converted, report = repa_mm.convert_pretrained(model, x, forward=forward_of(model))
    with torch.no_grad():
        assert all(y.isfinite().all() for y in outputs(converted, x[0]))


def test_a_block_of_a_known_name_that_computes_something_else(randomize):
    """Copies of a backbone's file with changes are common; the fit would not notice."""
    model, _ = pretrained(VIT, randomize)
    x = images()
    kind = type(model.layers[1])

    class TransformerEncoderLayer(kind):
        def forward(self, x):
            x = x + self.attn(self.ln1(x))
            return self.ln2(self.ffn(x, identity=x))  # post-norm

    for name, layer in (('layers.1', model.layers[1]), ('layers.0', model.layers[0])):
        layer.__class__ = TransformerEncoderLayer
        with pytest.raises(ValueError, match=f"'{name}', a TransformerEncoderLayer, does not end"):
            repa_mm.convert_pretrained(model, x)
        assert type(layer) is TransformerEncoderLayer and not layer._forward_hooks
    for layer in model.layers:
        layer.__class__ = kind
    repa_mm.convert_pretrained(model, x)


@pytest.mark.parametrize('case', [VIT, 'Swin'])
def test_wrapped_models_and_other_types(case, randomize, relative_error):
    model, _ = pretrained(case, randomize)
    x = images()
    expected, report = repa_mm.convert_pretrained(model, x, forward=forward_of(model))
    with torch.no_grad():
        y = outputs(expected, x[0])
        wrapped = torch.nn.DataParallel(copy.deepcopy(model))
        converted, _ = repa_mm.convert_pretrained(wrapped, x, forward=forward_of(wrapped.module))
        for a, b in zip(outputs(converted, x[0]), y):
            assert torch.equal(a, b)
        last = copy.deepcopy(model).to(memory_format=torch.channels_last)
        batches = [v.to(memory_format=torch.channels_last) for v in x]
        converted, _ = repa_mm.convert_pretrained(last, batches, forward=forward_of(last))
        for a, b in zip(outputs(converted, batches[0]), y):
            assert relative_error(a, b) < 1e-3
        half = copy.deepcopy(model).bfloat16()
        batches = [v.bfloat16() for v in x]
        converted, rows = repa_mm.convert_pretrained(half, batches, forward=forward_of(half))
        assert {p.dtype for p in converted.parameters()} == {torch.bfloat16}
        for row, known in zip(rows.blocks, report.blocks):
            assert row.unexplained == pytest.approx(known.unexplained, rel=0.3, abs=0.02)
    with torch.inference_mode():
        converted, _ = repa_mm.convert_pretrained(model, images(), forward=forward_of(model))
    converted.train()
    sum(v.square().mean() for v in outputs(converted, x[0])).backward()


@pytest.mark.parametrize('norm', ['keep', 'fold'])
def test_the_report_says_what_the_deploy_form_leaves(norm, randomize):
    """The unexplained share of the first block, measured by running that block."""
    model, _ = pretrained(VIT, randomize)
    x = images()
    tokens, targets, found = [], [], []
    kept = model.layers[0].register_forward_pre_hook(lambda m, args: tokens.append(args[0]))
    after = model.layers[0].register_forward_hook(lambda m, args, out: targets.append(out))
    with torch.no_grad():
        for batch in x:
            model(batch)
        kept.remove(), after.remove()
        converted, report = repa_mm.convert_pretrained(model, x, norm=norm)
        block = repa_mm.reparameterize(converted).layers[0]
        for t in tokens:
            found.append(block(t))
            # What comes before the FFN is as it was.
        middle = [t + model.layers[0].attn(model.layers[0].ln1(t)) for t in tokens]
    changes = torch.cat([b - m for b, m in zip(targets, middle)]).double().flatten(0, 1)
    errors = torch.cat([a - b for a, b in zip(found, targets)]).double().flatten(0, 1)
    share = float(errors.square().sum() / (changes - changes.mean(0)).square().sum())
    assert report.blocks[0].num_tokens == len(changes)
    assert share == pytest.approx(report.blocks[0].unexplained, rel=1e-3)


def changed_layers(model, forward):
    """A ViT whose layers compute something else."""
    for layer in model.layers:
        kind = type('TransformerEncoderLayer', (type(layer),), dict(forward=forward))
        layer.__class__ = kind
    return model


def in_place_afterwards(layer, x):
    x = x + layer.attn(layer.ln1(x))
    x = layer.ffn(layer.ln2(x), identity=x)
    x += 0.5 * layer.attn(layer.ln1(x))
    return x


def in_place_before(layer, x):
    x += layer.attn(layer.ln1(x))
    return layer.ffn(layer.ln2(x), identity=x).clone()


def twice(layer, x):
    x = x + layer.attn(layer.ln1(x))
    x = layer.ffn(layer.ln2(x), identity=x)
    return layer.ffn(layer.ln2(x), identity=x)


@pytest.mark.parametrize('forward', [in_place_afterwards, in_place_before])
def test_blocks_that_change_tensors_in_place(forward, randomize, relative_error):
    model, _ = pretrained(VIT, randomize)
    changed_layers(model, forward)
    x = images()
    with torch.no_grad():
        expected = outputs(model, x[0])[0].clone()
    converted, report = repa_mm.convert_pretrained(model, x, 0.25, held_out=x[:1])
    assert report.differences[0] < 0.05
    with torch.no_grad():
        assert torch.equal(outputs(model, x[0])[0], expected)


def test_blocks_whose_ffn_cannot_be_fitted(randomize):
    model, _ = pretrained(VIT, randomize)
    with pytest.raises(ValueError, match="'layers.0': it runs its FFN 2 times"):
        repa_mm.convert_pretrained(changed_layers(model, twice), images())
    model, _ = pretrained(VIT, randomize)
    model.layers[1].ffn.layers[0][1] = torch.nn.Softmax(dim=-1)
    with pytest.raises(ValueError, match="'layers.1'.*Softmax, mixes channels"):
        repa_mm.convert_pretrained(model, images())


def walked(model, batches, forward):
    """What each block gets on a walk, beside what it gets in the model's own forward pass."""
    blocks = find_blocks(model)
    walk = BlockWalk(model, blocks, batches, forward)
    real = {name: [] for name in blocks}
    handles = [
        block.register_forward_pre_hook(lambda m, args, name=name: real[name].append(args[0]))
        for name, block in blocks.items()
    ]
    for batch in batches:
        forward(batch)
    for handle in handles:
        handle.remove()
    history, found = [], {}
    calls = walk.calls(history)
    for index, (name, block) in enumerate(walk.blocks):
        found[name] = [args[0] for args, _ in calls]
        results = [block(*args, **kwargs) for args, kwargs in calls]
        walk.shapes.append([torch.empty_like(y, device='meta') for y in results])
        if index + 1 < len(walk.blocks):
            history = walk.remember(history, results)
            calls = walk.next_calls(calls, history)
    return walk, found, real


@pytest.mark.parametrize('sizes', [(64, 64), (64, 48)])
@torch.no_grad()
def test_blocks_that_go_on_from_an_earlier_one(sizes, randomize):
    """As the inner blocks of a TNT do, or those of a U-shaped ViT."""
    model, _ = pretrained(VIT, randomize)
    model.layers.append(copy.deepcopy(model.layers[1]))

    def forward(batch):
        tokens = model.patch_embed(batch)[0]
        first = model.layers[0](tokens)
        # Only where images are large does something lie between.
        second = model.layers[1](first if batch.shape[-1] < 64 else first + tokens)
        return model.layers[2](first + 0.3 * second.flip(1))

    batches = [torch.randn(2, 3, size, size) for size in reversed(sizes)]
    walk, found, real = walked(model, batches, forward)
    assert walk.replays and [link is None for link in walk.links] == [True, True, True]
    for name, inputs in real.items():
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found[name], inputs))


def test_in_inference_mode(randomize):
    model, _ = pretrained(VIT, randomize)
    x = images()
    expected, _ = repa_mm.convert_pretrained(model, x)
    converted, _ = repa_mm.convert_pretrained(model, x, forward=torch.inference_mode()(model))
    for key, value in expected.state_dict().items():
        assert torch.equal(converted.state_dict()[key], value)


def test_a_state_that_blocks_leave(randomize):
    """As where tokens are pruned by the scores of the last attention."""
    model, _ = pretrained(VIT, randomize)

    def forward(batch):
        first = model.layers[0](model.patch_embed(batch)[0])
        return model.layers[1](first * model.layers[0].score)

    def scoring(layer, x):
        x = layer.ffn(layer.ln2(x + layer.attn(layer.ln1(x))), identity=x)
        layer.score = x.std()
        return x

    with pytest.raises(ValueError, match="what 'layers.1' gets depends on more"):
        repa_mm.convert_pretrained(changed_layers(model, scoring), images(), forward=forward)
