"""Any backbone with channel-idle FFNs, from its own config."""

import copy

import pytest
import torch
from mmengine.config import Config, ConfigDict
from mmengine.registry import MODELS, init_default_scope

from repa_mm import reparameterize
from repa_mm.reparam import CheckpointError, has_deploy_form

SWINS = {
    'mmdet': dict(type='mmdet.SwinTransformer', embed_dims=32, depths=(1, 2), num_heads=(1, 2),
                  strides=(4, 2), out_indices=(0, 1)),
    'mmseg': dict(type='mmseg.SwinTransformer', embed_dims=32, depths=(1, 2), num_heads=(1, 2),
                  strides=(4, 2), out_indices=(0, 1)),
    'mmpretrain': dict(
        type='mmpretrain.SwinTransformer', out_indices=(0, 1), pad_small_map=True,
        arch=dict(embed_dims=32, depths=(1, 2), num_heads=(1, 2))),
}  # fmt: skip


def build(scope, **kwargs):
    init_default_scope(scope)
    return MODELS.build(dict(type='IdleChannels', backbone=copy.deepcopy(SWINS[scope]), **kwargs))


def scrambled(model):
    """Weights and statistics that are not the defaults."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            low, high = (0.5, 1.5) if name.endswith('running_var') else (-0.2, 0.2)
            tensor.add_(torch.empty_like(tensor).uniform_(low, high, generator=generator))
    return model


@pytest.mark.parametrize('scope', SWINS)
def test_builds_merges_and_loads(scope):
    model = scrambled(build(scope)).eval()
    assert isinstance(model, MODELS.get(SWINS[scope]['type']))
    image = torch.randn(2, 3, 64, 96)
    deployed = reparameterize(model)
    loaded = build(scope, deploy=True)
    assert has_deploy_form(loaded)
    loaded.load_state_dict(reparameterize(model, fuse_conv_bn=False).state_dict())
    for expected, *others in zip(model(image), deployed(image), loaded.eval()(image)):
        for other in others:
            assert (expected - other).abs().max() < 1e-5 * expected.abs().max()


def test_statistics_stay_where_they_are_to():
    model = build('mmdet', norm_eval=True).train()
    ffn = model.stages[0].blocks[0].ffn
    assert model.training and ffn.training and not ffn.norm1.training
    before = copy.deepcopy(ffn.norm1.state_dict())
    sum(y.sum() for y in model(torch.randn(2, 3, 64, 64))).backward()
    assert all(torch.equal(v, before[k]) for k, v in ffn.norm1.state_dict().items())
    assert build('mmdet').train().stages[0].blocks[0].ffn.norm1.training


def test_pretrained_weights_are_those_of_the_idle_backbone(tmp_path):
    vanilla = MODELS.build(SWINS['mmdet'])
    torch.save(vanilla.state_dict(), tmp_path / 'vanilla.pth')
    idle = scrambled(build('mmdet'))
    torch.save(idle.state_dict(), tmp_path / 'idle.pth')
    init = dict(type='Pretrained', checkpoint=str(tmp_path / 'vanilla.pth'))
    # The vanilla backbone's own start is not one of the channel-idle backbone.
    config = dict(SWINS['mmdet'], init_cfg=init)
    model = MODELS.build(dict(type='IdleChannels', backbone=config))
    assert model.init_cfg is None
    model = build('mmdet', init_cfg=Config(init)._cfg_dict)
    with pytest.raises(CheckpointError, match='vanilla backbone'):
        model.init_weights()
    init['checkpoint'] = str(tmp_path / 'idle.pth')
    model = build('mmdet', init_cfg=Config(init)._cfg_dict)
    model.init_weights()
    key = 'stages.0.blocks.0.ffn.norm1.running_var'
    assert torch.equal(model.state_dict()[key], idle.state_dict()[key])


@pytest.mark.parametrize('where', ['model', 'backbone'])
def test_vanilla_weights_are_not_read(where, monkeypatch):
    """MMSegmentation's models hand their ``pretrained`` on to the backbone."""
    pytest.importorskip('mmseg')
    init_default_scope('mmseg')
    given = dict(pretrained='vanilla.pth')
    backbone = copy.deepcopy(SWINS['mmseg']) | (given if where == 'backbone' else {})
    head = dict(type='FCNHead', in_channels=64, in_index=1, channels=8, num_classes=3, num_convs=1)
    model = MODELS.build(
        dict(
            type='EncoderDecoder',
            backbone=ConfigDict(type='IdleChannels', backbone=backbone),
            decode_head=head,
            **(given if where == 'model' else {}),
        )
    )
    said = []
    monkeypatch.setattr(
        'repa_mm.models.idle_backbone.print_log', lambda text, *args: said.append(text)
    )
    model.init_weights()
    assert len(said) == 1 and "random weights: 'vanilla.pth' has those of the vanilla" in said[0]


def test_what_is_no_backbone():
    for backbone, message in (
        ('swin', 'must be the config'),
        (dict(type='Swim'), "no backbone 'Swim'"),
        (dict(type='RePaSwinTransformer'), 'already'),
        (dict(type='mmdet.ResNet', depth=18), 'no block'),
    ):
        with pytest.raises(ValueError, match=message):
            MODELS.build(dict(type='IdleChannels', backbone=backbone))
