"""Which sites structures take."""

import copy

import pytest
import torch
import torch.nn as nn
from mmpretrain.models import PoolFormer, VisionTransformer

from repa_mm.models import STRUCTURES, Structure, add_structures_
from repa_mm.models.builder import WithStructures
from repa_mm.reparam import Form, TrainingForm

VIT = dict(img_size=32, patch_size=8, out_type='featmap')


class RestructuredViT(WithStructures, VisionTransformer):
    """Any structures."""


def vit_arch(num_layers):
    return dict(embed_dims=16, num_layers=num_layers, num_heads=2, feedforward_channels=40)


def filled(kind, arch, ordinary, path, **kwargs):
    """A model that starts from an ordinary one; for the tests of projects."""
    torch.save(ordinary.state_dict(), path)
    model = kind(arch, init_cfg=dict(type='Pretrained', checkpoint=str(path)), **kwargs)
    model.init_weights()
    return model.eval()


class Inner(TrainingForm):
    """A form behind the norm."""

    label = 'inner form'
    contains_norm = False

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x, identity):
        return identity + self.fc(x)


@STRUCTURES.register_module()
class InnerForms(Structure):
    def form(self, site):
        return Inner()


FFN_FORMS = dict(ChannelIdle='channel-idle FFN', InnerForms='inner form')


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


def test_a_form_behind_the_norm_leaves_the_norm():
    model = VisionTransformer(vit_arch(1), **VIT)
    layer = add_structures_(model, [dict(type='InnerForms')]).layers[0]
    nn.init.uniform_(layer.ln2.weight, 0.5, 2)
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(layer.ffn(layer.ln2(x), x), x + layer.ffn.fc(layer.ln2(x)))
    assert type(layer.ln2) is nn.LayerNorm


def test_a_block_that_calls_its_ffn_in_another_way_is_refused_before_anything_changes():
    vit, pool = VisionTransformer(vit_arch(1), **VIT), PoolFormer('s12')
    blocks = torch.nn.Sequential(vit.layers[0], pool.network[0][0])
    with pytest.raises(ValueError, match='PoolFormerBlock does not call its FFN as'):
        add_structures_(blocks, [dict(type='InnerForms')])
    assert not any(isinstance(m, Form) for m in blocks.modules())


def test_a_frozen_norm_freezes_no_linear_layer():
    structures = [dict(type='ChannelIdle', norm_cfg=dict(type='BN', requires_grad=False))]
    ffn = RestructuredViT(vit_arch(1), structures=structures, **VIT).layers[0].ffn
    assert all(p.requires_grad for p in (*ffn.fc1.parameters(), *ffn.fc2.parameters()))
    frozen = RestructuredViT(vit_arch(1), structures=structures, frozen_stages=1, **VIT)
    assert not any(p.requires_grad for p in frozen.layers[0].parameters())
