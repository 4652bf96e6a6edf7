"""Which sites structures take, and what they compute of the layers that fill them."""

import copy

import pytest
import torch
from mmpretrain.models import PoolFormer, VisionTransformer

from repa_mm.models import ExpertsVisionTransformer, add_structures_
from repa_mm.models.builder import Restructured
from repa_mm.reparam import CheckpointError, Form, reparameterize

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


FFN_FORMS = dict(
    ChannelIdle='channel-idle FFN', LinearPath='FFN with a linear path', Experts='FFN of experts'
)


@pytest.mark.parametrize('first', FFN_FORMS)
@pytest.mark.parametrize('second', FFN_FORMS)
def test_a_site_takes_one_form(first, second):
    """And a structure that is refused at a later block leaves all blocks as they are."""
    model = VisionTransformer(vit_arch(2), **VIT)
    add_structures_(model.layers[1], [dict(type=first)])
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match="'layers.1.*there is an? .* already") as error:
        add_structures_(model, [dict(type=second)])
    assert FFN_FORMS[first] in str(error.value)
    x = torch.randn(1, 3, 32, 32)
    model.eval(), before.eval()  # which return None
    assert torch.equal(model(x)[0], before(x)[0])
    assert model.state_dict().keys() == before.state_dict().keys()


def test_a_block_that_calls_its_ffn_in_another_way_is_refused_before_anything_changes():
    vit, pool = VisionTransformer(vit_arch(1), **VIT), PoolFormer('s12')
    blocks = torch.nn.Sequential(vit.layers[0], pool.network[0][0])
    with pytest.raises(ValueError, match='PoolFormerBlock does not call its FFN as'):
        add_structures_(blocks, [dict(type='Experts')])
    assert not any(isinstance(m, Form) for m in blocks.modules())


def test_a_frozen_norm_freezes_no_linear_layer():
    idle = dict(type='ChannelIdle', norm_cfg=dict(type='BN', requires_grad=False))
    for structures in ([idle], [dict(type='Experts')]):
        ffn = RestructuredViT(vit_arch(1), structures=structures, **VIT).layers[0].ffn
        assert all(p.requires_grad for p in (*ffn.fc1.parameters(), *ffn.fc2.parameters()))
        frozen = RestructuredViT(vit_arch(1), structures=structures, frozen_stages=1, **VIT)
        assert not any(p.requires_grad for p in frozen.layers[0].parameters())


def test_weights_without_the_layer_scale_do_not_fill(tmp_path):
    """As those of merged experts, whose matrices have it."""
    kwargs = dict(num_experts=2, layer_scale_init_value=1e-5, **VIT)
    merged = reparameterize(ExpertsVisionTransformer(vit_arch(1), **kwargs))
    with pytest.raises(CheckpointError, match='lack .*gamma2'):
        filled(ExpertsVisionTransformer, vit_arch(1), merged, tmp_path / 'vit.pth', **kwargs)


def test_the_linear_path_takes_pretrained_weights(tmp_path):
    ordinary = VisionTransformer(vit_arch(2), **VIT)
    torch.save(ordinary.state_dict(), tmp_path / 'vit.pth')
    structures = [dict(type='LinearPath', idle_ratio=[0.5, None])]
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'vit.pth'))
    model = RestructuredViT(vit_arch(2), structures=structures, init_cfg=init_cfg, **VIT)
    model.init_weights()
    first, second = (model.layers[i].ffn for i in range(2))
    fc1, fc2 = ordinary.layers[0].ffn.layers[0][0], ordinary.layers[0].ffn.layers[1]
    assert torch.equal(first.fc1.weight, fc1.weight[:20])
    torch.testing.assert_close(first.linear.weight, fc2.weight[:, 20:] @ fc1.weight[20:])
    assert torch.equal(second.layers[1].weight, ordinary.layers[1].ffn.layers[1].weight)
