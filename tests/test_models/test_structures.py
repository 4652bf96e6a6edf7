"""Which sites structures take, and what they compute of the layers that fill them."""

import copy

import pytest
import torch
from mmpretrain.models import SwinTransformer, VisionTransformer

from repa_mm.faster.attention import FastShiftWindowMSA
from repa_mm.models import ParallelSwinTransformer, ParallelVisionTransformer, add_structures_
from repa_mm.models.builder import Restructured
from repa_mm.reparam import CheckpointError, ParallelAttention

VIT = dict(img_size=32, patch_size=8, out_type='featmap')
SWIN = dict(window_size=4, img_size=64, pad_small_map=True, out_indices=(0, 1, 2, 3))


class RestructuredViT(Restructured, VisionTransformer):
    """Any structures."""


def vit_arch(num_layers):
    return dict(embed_dims=16, num_layers=num_layers, num_heads=2, feedforward_channels=40)


def swin_arch(depths):
    return dict(embed_dims=8, depths=depths, num_heads=[1, 2, 2, 4])


def filled(kind, arch, ordinary, path, **kwargs):
    torch.save(ordinary.state_dict(), path)
    model = kind(arch, init_cfg=dict(type='Pretrained', checkpoint=str(path)), **kwargs)
    model.init_weights()
    return model.eval()


@pytest.mark.parametrize('scale', [0.0, 1e-5])
def test_ordinary_layers_fill_the_branches(scale, randomize, relative_error, tmp_path):
    """Each branch computes of the block's input what its layer does."""
    kwargs = dict(VIT, layer_scale_init_value=scale)
    ordinary = randomize(VisionTransformer(vit_arch(6), **kwargs))
    ordinary.eval()
    for layer in ordinary.layers if scale else ():
        torch.nn.init.uniform_(layer.attn.gamma1.weight, -1, 1)
        torch.nn.init.uniform_(layer.ffn.gamma2.weight, -1, 1)
    model = filled(
        ParallelVisionTransformer, vit_arch(2), ordinary, tmp_path / 'vit.pth', num_branches=3,
        **kwargs,
    )  # fmt: skip
    x = torch.randn(2, 17, 16)
    for i, block in enumerate(model.layers):
        layers = ordinary.layers[3 * i : 3 * i + 3]
        middle = x + sum(layer.attn(layer.ln1(x)) for layer in layers)
        end = middle
        for layer in layers:
            end = end + layer.ffn(layer.ln2(middle)) - layer.ln2(middle)
        assert relative_error(block(x), end) < 1e-5
    for key in ('ln1.weight', 'pos_embed', 'patch_embed.projection.weight'):
        assert torch.equal(model.state_dict()[key], ordinary.state_dict()[key])


def test_layers_of_one_grid_fill_a_block_of_swin(randomize, relative_error, tmp_path):
    ordinary = randomize(SwinTransformer(swin_arch([2, 2, 12, 2]), **SWIN))
    ordinary.eval()
    for name, p in ordinary.named_parameters():
        if 'table' in name:
            torch.nn.init.normal_(p)
    model = filled(
        ParallelSwinTransformer, swin_arch([2, 2, 4, 2]), ordinary, tmp_path / 'swin.pth',
        num_branches=(1, 1, 3, 1), **SWIN,
    )  # fmt: skip
    # A map of whole windows: padding is not normalized.
    x, shape = torch.randn(2, 64, 32), (8, 8)
    for k, numbers in enumerate([(0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11)]):
        layers = [ordinary.stages[2].blocks[j] for j in numbers]
        assert {layer.attn.shift_size for layer in layers} == {2 * (k % 2)}
        block = model.stages[2].blocks[k]
        middle = x + sum(layer.attn(layer.norm1(x), shape) for layer in layers)
        end = middle
        for layer in layers:
            end = end + layer.ffn(layer.norm2(middle)) - layer.norm2(middle)
        assert relative_error(block(x, shape), end) < 1e-5
    with_branches = {
        name.split('.')[1] for name, m in model.named_modules() if isinstance(m, ParallelAttention)
    }
    assert with_branches == {'2'}
    assert type(model.stages[0].blocks[0].attn) is FastShiftWindowMSA


def test_layers_that_cannot_be_branches(tmp_path):
    few = VisionTransformer(vit_arch(4), **VIT)
    with pytest.raises(CheckpointError, match="lack .* of 'layers.4'"):
        filled(
            ParallelVisionTransformer, vit_arch(2), few, tmp_path / 'few.pth', num_branches=3, **VIT
        )
    plain = dict(VIT, qkv_bias=False)
    without_bias = VisionTransformer(vit_arch(6), **plain)
    for layer in without_bias.layers:
        torch.nn.init.ones_(layer.ln1.bias)
    with pytest.raises(ValueError, match='no bias for the shift'):
        filled(
            ParallelVisionTransformer, vit_arch(2), without_bias, tmp_path / 'plain.pth',
            num_branches=3, **plain,
        )  # fmt: skip


def test_arch_counts_layers_by_name_and_blocks_in_a_dict():
    with torch.device('meta'):
        for name, width in (('vit-tiny', 192), ('vit-s', 384), ('base', 768)):
            model = ParallelVisionTransformer(name, num_branches=3)
            assert len(model.layers) == 4 and model.embed_dims == width
            assert model.layers[0].attn.num_branches == 3
    assert len(ParallelVisionTransformer(vit_arch(5), num_branches=2, **VIT).layers) == 5
    assert ParallelSwinTransformer('small', num_branches=3).depths == [2, 2, 6, 2]


@pytest.mark.parametrize(
    'make, message',
    [
        (lambda: ParallelVisionTransformer('vit-tiny', num_branches=5), '12 layers of vit-tiny'),
        (lambda: ParallelVisionTransformer(vit_arch(2), num_branches=-1), '1 branch or more'),
        (lambda: ParallelSwinTransformer('small', num_branches=4), 'no stage of .* has branches'),
        (lambda: ParallelSwinTransformer('small', num_branches=(1, 2, 3, 1)), 'stage 1 of .small'),
        (
            lambda: ParallelVisionTransformer(
                vit_arch(2), num_branches=2, layer_cfgs=dict(ffn_type='swiglu_fused')
            ),
            'SwiGLUFFNFused is not',
        ),
    ],
)
def test_branches_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_norms_that_go_behind_branches_are_filled_once(relative_error, randomize, tmp_path):
    """Scales and shifts of the norms are in the matrices of the branches."""
    ordinary = randomize(VisionTransformer(vit_arch(4), **VIT))
    torch.save(ordinary.state_dict(), tmp_path / 'vit.pth')
    kwargs = dict(VIT, init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'vit.pth')))
    models = []
    for structures in ([], [dict(type='ProgressiveNorms')]):
        model = RestructuredViT(
            vit_arch(2),
            structures=[dict(type='Branches'), *structures],
            ordinary=(vit_arch(4),),
            **kwargs,
        )
        model.init_weights()
        models.append(model.eval())
    x = torch.randn(2, 3, 32, 32)
    assert relative_error(models[1](x)[0], models[0](x)[0]) < 1e-5


FFN_FORMS = dict(ChannelIdle='channel-idle FFN', Branches='parallel FFN')


@pytest.mark.parametrize('first', FFN_FORMS)
@pytest.mark.parametrize('second', FFN_FORMS)
def test_a_site_takes_one_form(first, second):
    """And a structure that is refused at a later block leaves all blocks as they are."""
    model = VisionTransformer(vit_arch(2), **VIT)
    add_structures_(model.layers[1], [dict(type=first)])
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match="'layers.1.*there is an? .* already") as error:
        add_structures_(model, [dict(type=second)])
    attention = first == second == 'Branches'
    assert ('parallel attention' if attention else FFN_FORMS[first]) in str(error.value)
    x = torch.randn(1, 3, 32, 32)
    model.eval(), before.eval()  # which return None
    assert torch.equal(model(x)[0], before(x)[0])
    assert model.state_dict().keys() == before.state_dict().keys()


def test_progressive_norms_are_no_place_for_branches():
    structures = [dict(type='ProgressiveNorms'), dict(type='Branches')]
    with pytest.raises(ValueError, match='linear layer with a progressive norm already'):
        RestructuredViT(vit_arch(2), structures=structures, **VIT)


def test_branches_of_other_numbers_in_each_block_are_not_filled(tmp_path):
    torch.save(VisionTransformer(vit_arch(4), **VIT).state_dict(), tmp_path / 'vit.pth')
    structures = [dict(type='Branches', num_branches=[2, 2, 1, 1])]
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'vit.pth'))
    model = RestructuredViT(vit_arch(4), structures=structures, init_cfg=init_cfg, **VIT)
    with pytest.raises(ValueError, match='as many in each block'):
        model.init_weights()


def test_a_frozen_norm_freezes_no_linear_layer():
    idle = dict(type='ChannelIdle', norm_cfg=dict(type='BN', requires_grad=False))
    for structures in ([idle], [dict(type='Branches')]):
        ffn = RestructuredViT(vit_arch(1), structures=structures, **VIT).layers[0].ffn
        assert all(p.requires_grad for p in (*ffn.fc1.parameters(), *ffn.fc2.parameters()))
        frozen = RestructuredViT(vit_arch(1), structures=structures, frozen_stages=1, **VIT)
        assert not any(p.requires_grad for p in frozen.layers[0].parameters())
    norms, plain = [dict(type='ProgressiveNorms')], dict(type='LN', requires_grad=False)
    model = RestructuredViT(vit_arch(1), structures=norms, norm_cfg=plain, **VIT)
    assert model.layers[0].attn.qkv.linear.weight.requires_grad
