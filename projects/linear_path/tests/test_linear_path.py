"""Linear paths pass the tests of the package's own forms, structures and backbones."""

import pytest
import torch
import torch.nn.functional as F
from mmpretrain.models import VisionTransformer

from projects.linear_path import LinearPathFFN
from repa_mm.models import add_structures_
from repa_mm.reparam import ChannelIdleFFN, MergedFFN, reparameterize
from tests.shared import backbone_tests, form_tests
from tests.test_models import test_backbones, test_structures
from tests.test_models.test_backbones import check_same, scattered  # noqa: F401
from tests.test_models.test_structures import VIT, RestructuredViT, vit_arch
from tests.test_reparam.test_forms import C, H, make, ordinary, tokens  # noqa: F401


def linear_path(**kwargs):
    return lambda: LinearPathFFN(C, H, layer_scale_init_value=0.5, drop_path=0.1, **kwargs)


FORMS = dict(
    path=(linear_path(), MergedFFN, 1),
    path_0=(linear_path(idle_ratio=0), MergedFFN, 1),
    path_without_norms=(linear_path(norm_cfg=None), MergedFFN, 1),
    path_ln=(linear_path(norm_cfg=dict(type='LN')), MergedFFN, 1),
)
BACKBONES = dict(
    path_vit=dict(
        model=dict(
            type='mmpretrain.VisionTransformer', layer_scale_init_value=0.5, **test_backbones.VIT
        ),
        structures=[dict(type='LinearPath', idle_ratio=0.5)],
    ),
    path_poolformer=dict(
        model=dict(type='mmpretrain.PoolFormer', frozen_stages=-1, **test_backbones.POOL),
        structures=[dict(type='LinearPath', norm_cfg=None)],
    ),
)


form_rows, test_as_other_forms, test_merge_is_exact = form_tests(FORMS, hostile=[1])
backbone_rows, test_as_other_backbones = backbone_tests(
    {name: (dict(cfg, type='Restructured'), '', False) for name, cfg in BACKBONES.items()}
)


@pytest.mark.parametrize('norm_cfg', [None, dict(type='BN')])
def test_the_linear_path_is_filled_with_idle_channels(norm_cfg, relative_error):
    form = LinearPathFFN(C, H, norm_cfg=norm_cfg).eval()
    parts, _ = ordinary('ffn')
    form.fill(parts)
    x = F.layer_norm(tokens('ffn'), (C,))
    h = parts.fc1(x * parts.norm.weight + parts.norm.bias)
    h = torch.cat([F.gelu(h[..., :10]), h[..., 10:]], -1)
    # Fresh statistics are a mean of 0 and a variance of 1, beside which epsilon is small.
    assert relative_error(form(x) - x, parts.fc2(h) * parts.scale) < 1e-4


def test_it_merges_into_what_channel_idle_merges_into():
    merged = [reparameterize(kind(C, H)) for kind in (LinearPathFFN, ChannelIdleFFN)]
    merged[1].load_state_dict(merged[0].state_dict())


def test_linear_paths_that_cannot_be():
    with pytest.raises(ValueError, match='no channel would be active'):
        LinearPathFFN(C, H, idle_ratio=1)


@pytest.mark.parametrize('first', ['LinearPath', 'ChannelIdle'])
def test_a_site_takes_one_form(first, monkeypatch):
    monkeypatch.setitem(test_structures.FFN_FORMS, 'LinearPath', 'FFN with a linear path')
    test_structures.test_a_site_takes_one_form(first, 'LinearPath')


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


def test_paths_of_frozen_layers_are_frozen():
    model = VisionTransformer(vit_arch(2), **VIT)
    for p in model.layers[0].ffn.layers.parameters():
        p.requires_grad_(False)
    add_structures_(model, [dict(type='LinearPath')])
    first, second = (layer.ffn for layer in model.layers)
    trained = {name for name, p in first.named_parameters() if p.requires_grad}
    assert trained == {'norm1.weight', 'norm1.bias'}
    assert all(p.requires_grad for p in second.parameters())
