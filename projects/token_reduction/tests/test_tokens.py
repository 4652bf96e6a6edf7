"""Fewer tokens: exact where tokens are the same, and nothing else changes."""

import copy
import math
import pickle

import pytest
import torch
from mmengine.registry import MODELS, init_default_scope
from mmpretrain.models import PoolFormer, SwinTransformer, VisionTransformer
from mmpretrain.models.backbones.swin_transformer import SwinBlock

import repa_mm
from projects.token_reduction import ReducedSwinBlock, reduce_tokens, reduce_tokens_
from projects.token_reduction.tokens import _layout, merge_neighbours
from repa_mm.faster import Geometry
from repa_mm.measure import count
from repa_mm.models import RePaSwinTransformer, RePaVisionTransformer, add_structures_
from repa_mm.reparam import CheckpointError, TrainingForm

SWIN = dict(
    arch=dict(embed_dims=16, depths=[2, 2, 2], num_heads=[2, 2, 4]),
    out_indices=(0, 1, 2),
    pad_small_map=True,
    window_size=5,
    stage_cfgs=dict(block_cfgs=dict(attn_cfgs=dict(qk_scale=0.5))),
)
VIT = dict(
    arch=dict(embed_dims=32, num_layers=3, num_heads=4, feedforward_channels=96),
    img_size=64,
    patch_size=8,
    out_type='raw',
    out_indices=[0, 2],
)
KINDS = dict(swin=(RePaSwinTransformer, SWIN), vit=(RePaVisionTransformer, VIT))


def build(kind, randomize, **kwargs):
    cls, args = KINDS[kind]
    model = randomize(cls(**copy.deepcopy(args), **kwargs))
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if hasattr(module, 'relative_position_bias_table'):
            module.relative_position_bias_table.data.normal_(generator=generator)
    return model.eval()


def images(*shape):
    """Smooth on the left, noise on the right."""
    x = torch.randn(shape)
    x[..., : shape[-1] // 2] *= 0.02
    return x


def block_of(window, shift, randomize):
    block = SwinBlock(16, 2, window, shift=shift, pad_small_map=True, attn_cfgs=dict(qk_scale=0.5))
    block.attn.w_msa.relative_position_bias_table.data.normal_()
    return randomize(reduce_tokens(block, 0.5)).eval()


@torch.no_grad()
@pytest.mark.parametrize('kind', KINDS)
def test_all_tokens_kept_is_the_same_model(kind, randomize):
    model = repa_mm.reparameterize(build(kind, randomize))
    x = images(2, 3, 160, 128)
    for reduced in (reduce_tokens(model, 1), reduce_tokens(reduce_tokens(model, 0.4), 1.0)):
        for actual, expected in zip(reduced(x), model(x)):
            assert torch.equal(actual, expected)
    for actual, expected in zip(reduce_tokens(model, 0.4)(x), model(x)):
        assert actual.shape == expected.shape
        assert not torch.allclose(actual, expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize('window', [4, 7])
@pytest.mark.parametrize('shift', [False, True])
def test_windows_of_equal_tokens_are_exact(window, shift, randomize, relative_error):
    """Whatever the biases and the masks."""
    block = block_of(window, shift, randomize)
    block.keep = 0.001
    size = 3 * window, 4 * window
    layout = _layout(Geometry(*size, window, block.attn.shift_size), 'cpu')
    tokens = torch.randn(2, 12, 16)
    x = tokens[:, layout.window]
    expected = SwinBlock.forward(block, x, size)
    assert relative_error(block(x, size), expected) < 1e-5
    assert relative_error(block(x + 0.1 * torch.randn_like(x), size), expected) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize('size', [(15, 20), (13, 22), (24, 31)])
@pytest.mark.parametrize('shift', [False, True])
def test_windows_of_little_change_are_one_token(size, shift, randomize):
    """The others, and those with padding, are as in an ordinary block."""
    block = block_of(5, shift, randomize)
    rows, padded, *_ = _layout(Geometry(*size, 5, block.attn.shift_size), 'cpu')
    batch, num_windows = 3, len(rows)
    x = torch.randn(batch, 1, 16) + 0.01 * torch.randn(batch, size[0] * size[1], 16)
    chosen = (torch.rand(batch, num_windows) - padded.any(1).float()).argsort(1)
    chosen = chosen[:, : num_windows - num_windows // 2]
    for image, lively in zip(x, chosen):
        where = rows[lively][~padded[lively]]
        image[where] = torch.randn(len(where), 16)
    difference = (block(x, size) - SwinBlock.forward(block, x, size)).abs().amax(2)
    for image, lively in zip(difference, chosen):
        of_windows = image[rows].masked_fill(padded, 0).amax(1)
        assert of_windows[lively].max() < 1e-4
    assert (difference > 1e-3).any()


@torch.no_grad()
@pytest.mark.parametrize('size', [(5, 5), (6, 5), (3, 31), (1, 2)])
@pytest.mark.parametrize('shift', [False, True])
def test_small_maps(size, shift, randomize):
    block = block_of(5, shift, randomize)
    x = torch.randn(2, size[0] * size[1], 16)
    expected = SwinBlock.forward(block, x, size)
    actual = block(x, size)
    assert actual.shape == x.shape and actual.isfinite().all()
    assert torch.equal(actual, expected) == (max(size) <= 5)


@torch.no_grad()
@pytest.mark.parametrize('kind', KINDS)
def test_images_of_a_batch_are_independent(kind, randomize, relative_error):
    model = reduce_tokens(repa_mm.reparameterize(build(kind, randomize)), 0.6)
    x = images(3, 3, 160, 128)
    x[1] *= 5
    together = model(x)
    for i in range(3):
        for whole, alone in zip(together, model(x[i : i + 1])):
            assert relative_error(whole[i : i + 1], alone) < 1e-5


@pytest.mark.parametrize('kind', KINDS)
def test_merging_and_reducing_commute(kind, randomize, relative_error):
    model = build(kind, randomize, drop_path_rate=0.2)
    x = images(2, 3, 160, 128)
    first = reduce_tokens(repa_mm.reparameterize(model), 0.5)
    second = repa_mm.reparameterize(reduce_tokens(model, 0.5))
    with torch.no_grad():
        for a, b, c in zip(first(x), second(x), reduce_tokens(model, 0.5)(x)):
            assert torch.equal(a, b)
            assert relative_error(c, a) < 1e-5


@pytest.mark.parametrize('kind', KINDS)
def test_training_is_not_reduced(kind, randomize):
    model = build(kind, randomize, drop_path_rate=0.0)
    reduced = reduce_tokens(model, 0.5)
    x = images(2, 3, 160, 128)
    for a, b in zip(model.train()(x), reduced.train()(x)):
        assert torch.equal(a, b)
    # Gradients pass in eval mode, too.
    reduced.eval()
    sum(y.square().mean() for y in reduced(x)).backward()
    for name, parameter in reduced.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@pytest.mark.parametrize('kind', KINDS)
def test_weights_and_copies(kind, randomize):
    model = repa_mm.reparameterize(build(kind, randomize))
    before = [type(m) for m in model.modules()]
    reduced = reduce_tokens(model, 0.5)
    assert [type(m) for m in model.modules()] == before
    assert list(reduced.state_dict()) == list(model.state_dict())
    other = reduce_tokens(repa_mm.reparameterize(KINDS[kind][0](**KINDS[kind][1])), 0.5)
    other.load_state_dict(model.state_dict())
    x = images(1, 3, 160, 128)
    with torch.inference_mode():
        expected = reduced(x)
    with torch.no_grad():
        copies = [other, copy.deepcopy(reduced), pickle.loads(pickle.dumps(reduced))]
        copies += [reduce_tokens_(model, 0.5)]
        for copied in copies:
            for a, b in zip(copied(x), expected):
                assert torch.equal(a, b)
    assert copies[-1] is model


def test_fewer_multiply_adds(randomize):
    for kind, less in (('swin', 0.8), ('vit', 0.9)):
        model = repa_mm.reparameterize(build(kind, randomize))
        image = torch.zeros(1, 3, 320, 320)
        whole, part = (count(m, image)[1] for m in (model, reduce_tokens(model, 0.5)))
        assert part < less * whole


OTHER_SWIN = dict(
    embed_dims=16,
    depths=(2, 2),
    num_heads=(2, 2),
    strides=(4, 2),
    out_indices=(0, 1),
    window_size=5,
)
SWINS = dict(mmpretrain=SWIN, mmdet=OTHER_SWIN, mmseg=OTHER_SWIN)


@pytest.mark.parametrize('scope', SWINS)
@pytest.mark.parametrize('deploy', [False, True])
def test_a_line_of_the_config(scope, deploy, randomize, relative_error):
    init_default_scope(scope)
    swin = dict(type=f'{scope}.SwinTransformer', **SWINS[scope])
    structures = [dict(type='ChannelIdle')]

    def build(*more):
        cfg = dict(type='Restructured', model=swin, structures=[*structures, *more], deploy=deploy)
        return MODELS.build(copy.deepcopy(cfg)).eval()

    model, reduced = randomize(build()), build(dict(type='ReduceTokens', keep=0.5))
    reduced.load_state_dict(model.state_dict())
    x = images(2, 3, 130, 160)
    with torch.no_grad():
        for a, b, c in zip(reduced(x), reduce_tokens(model, 0.5)(x), model(x)):
            assert torch.equal(a, b)
            assert relative_error(a, c) > 1e-3


def test_weights_of_a_form_are_refused_by_an_ordinary_ffn_of_a_reduced_block():
    models = []
    for ratio in (0.75, None):
        idle = dict(type='ChannelIdle', idle_ratio=[0.75, 0.75, ratio])
        model = VisionTransformer(**copy.deepcopy(VIT))
        models.append(add_structures_(model, [idle, dict(type='ReduceTokens')]))
    with pytest.raises(CheckpointError, match="an ordinary FFN at 'layers.2.ffn'"):
        models[1].load_state_dict(models[0].state_dict(), strict=False)


def test_pretrained_weights_fill_the_forms_of_reduced_blocks(tmp_path):
    stock = SwinTransformer(**copy.deepcopy(SWIN))
    torch.save(stock.state_dict(), tmp_path / 'swin.pth')
    cfg = dict(
        type='Restructured',
        model=dict(type='mmpretrain.SwinTransformer', **SWIN),
        structures=[dict(type='ChannelIdle'), dict(type='ReduceTokens')],
        init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'swin.pth')),
    )
    model = MODELS.build(copy.deepcopy(cfg))
    model.init_weights()
    block, other = model.stages[1].blocks[1], stock.stages[1].blocks[1]
    assert type(block) is ReducedSwinBlock and block.keep == 0.7
    assert torch.equal(block.ffn.fc1.weight, other.ffn.layers[0][0].weight)
    assert torch.equal(block.attn.w_msa.qkv.weight, other.attn.w_msa.qkv.weight)


def test_reduced_blocks_take_no_structure_and_no_conversion(randomize):
    vit = reduce_tokens(VisionTransformer(**copy.deepcopy(VIT)), 0.6)
    with pytest.raises(ValueError, match='no site for ChannelIdle: no block of a family'):
        add_structures_(vit, [dict(type='ChannelIdle')])
    with pytest.raises(ValueError, match='VisionTransformer has no block of a family'):
        repa_mm.convert_pretrained(vit, [images(2, 3, 64, 64)])


def test_stock_swin(randomize, relative_error):
    """Vanilla blocks, with the stock attention."""
    stock = randomize(SwinTransformer(**SWIN))
    stock.eval()
    x = images(2, 3, 160, 128)
    with torch.no_grad():
        for a, b in zip(reduce_tokens(stock, 1)(x), stock(x)):
            assert relative_error(a, b) < 1e-5
        for a, b in zip(reduce_tokens(stock, 0.5)(x), stock(x)):
            assert relative_error(a, b) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize('keep', [0.001, 0.2, 0.3334, 0.5, 0.75, 0.999])
@pytest.mark.parametrize('extra', [0, 1, 5])
def test_patches_that_are_merged(keep, extra):
    x = torch.randn(3, extra + 77, 8)
    tokens, place, sizes = merge_neighbours(x, keep, extra)
    assert tokens.shape[1] == len(sizes)
    assert abs(len(sizes) - extra - 77 * keep) <= max(math.ceil(1 / keep), 2)
    assert torch.equal(place[:, :extra], torch.arange(extra).expand(3, -1))
    for image, places, left in zip(x, place, tokens):
        counts = places.bincount(minlength=len(sizes))
        assert torch.equal(counts, sizes.long())
        for i, found in enumerate(left):
            torch.testing.assert_close(found, image[places == i].mean(0))


@torch.no_grad()
def test_equal_patches_are_exact(randomize, relative_error):
    """And it is them that are merged."""
    vit = build('vit', randomize)
    x = torch.randn(2, 65, 32)
    x[:, 2:34:2] = x[:, 1:33:2]
    expected = vit.layers[0](x)
    for keep, equal in ((0.75, True), (0.6, False)):
        layer = reduce_tokens(vit, keep).layers[0]
        assert (relative_error(layer(x), expected) < 1e-5) is equal


@pytest.mark.parametrize('keep', [0.05, 1.01, [0.5, 0, 1]])
def test_a_share_is_from_a_tenth_to_all(keep):
    with pytest.raises(ValueError, match='from 0.1 to 1, but is'):
        reduce_tokens(SwinTransformer(**SWIN), keep)


def test_models_without_such_blocks():
    arch = dict(layers=[1] * 4, embed_dims=[8] * 4, mlp_ratios=[4] * 4, layer_scale_init_value=0.1)
    with pytest.raises(ValueError, match='no block of this PoolFormer can be reduced'):
        reduce_tokens(PoolFormer(arch), 0.5)


@pytest.mark.parametrize('kind', KINDS)
def test_exported(kind, randomize):
    """Of any size and batch."""
    from tests.test_export.test_export import check_backbone

    model = reduce_tokens(repa_mm.reparameterize(build(kind, randomize)), 0.6)
    check_backbone(model, [(128, 160), (192, 192), (193, 128)])


def test_a_share_for_each_stage(randomize):
    model = reduce_tokens(build('swin', randomize), [0.6, 0.5, 1])
    assert [[b.keep for b in stage.blocks] for stage in model.stages] == [
        [0.6] * 2,
        [0.5] * 2,
        [1] * 2,
    ]
    with pytest.raises(ValueError, match='keep has 2 entries, but the model has 3 stages'):
        reduce_tokens_(model, [0.6, 0.5])
    assert model.stages[0].blocks[0].keep == 0.6


class Adapter(torch.nn.Linear):
    """As one that computes something else."""


def test_blocks_with_another_attention_stay():
    model = SwinTransformer(**copy.deepcopy(SWIN))
    model.stages[1].blocks[0].attn.w_msa.qkv = Adapter(32, 96)
    model.stages[2].blocks[1].attn.w_msa = ToyAttention(64)
    reduced = reduce_tokens(model, 0.5)
    kinds = [[type(b) is ReducedSwinBlock for b in stage.blocks] for stage in reduced.stages]
    assert kinds == [[True, True], [False, True], [True, False]]


class ToyAttention(TrainingForm):
    def __init__(self, dims):
        super().__init__()
        self.qkv = torch.nn.Linear(dims, 3 * dims)
