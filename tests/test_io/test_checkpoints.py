"""Reading checkpoints, fitting them to models, and writing them."""

import copy

import pytest
import torch
import torch.nn as nn
from mmengine.registry import MODELS
from mmengine.runner.checkpoint import load_state_dict
from mmpretrain.models import SwinTransformerV2, VisionTransformer

from repa_mm.io.checkpoints import load_weights
from repa_mm.reparam import ChannelIdleFFN, CheckpointError


@pytest.mark.parametrize(
    'change, message',
    [
        ({'2.1.weight': torch.ones(1)}, 'a.pth is of another model: it has 2.1.weight'),
        (dict(other=torch.ones(1)), None),
        ({'0.fc1.weight': None}, 'a.pth: .*fc1.weight'),
        ({'1.weight': None}, 'a.pth is of another model: it lacks 1.weight'),
        ({'1.weight': torch.ones(3, 3)}, 'a.pth: .*size mismatch for 1.weight'),
        ({'1.num_batches_tracked': None, '0.num_active_channels': None}, None),
    ],
)
def test_what_does_not_fit_is_named(change, message, randomize):
    model = randomize(
        nn.Sequential(ChannelIdleFFN(8, 32), nn.BatchNorm1d(5), nn.Sequential(nn.Identity()))
    )
    weights = {k: v for k, v in {**model.state_dict(), **change}.items() if v is not None}
    if message is None:
        return load_weights(model, weights, 'a.pth')
    with pytest.raises(CheckpointError, match=f'(?s){message}'):
        load_weights(model, weights, 'a.pth')


@pytest.mark.parametrize(
    'key, fits',
    [
        ('data_preprocessor.mean', True),  # of older versions
        ('ema_backbone_cls_token', True),
        ('teacher.backbone.ln1.weight', True),
        ('auxiliary_head.conv_seg.weight', True),
        ('roi_head.mask_head.upsample.weight', True),
        ('text.embeddings.position_ids', True),  # a buffer of older versions of transformers
        ('backbone.mask_token', True),
        ('backbone.layers.0.attn.attn_mask', True),
        ('neck.convs.0.weight', False),
        ('backbone.pre_norm.weight', False),
        ('backbone.ln2.weight', False),
        ('backbone.dist_token', False),
        ('backbone.layers.0.attn.gamma1.weight', False),
        ('backbone.layers.1.ln1.weight', False),
        ('roi_head.bbox_head.norm.weight', False),
    ],
)
def test_what_a_file_may_have_beside_a_model(key, fits):
    """And what it may not have inside: the config forgot it."""
    arch = dict(embed_dims=8, num_layers=1, num_heads=1, feedforward_channels=16)
    parts = dict(backbone=VisionTransformer(arch, img_size=32), text=nn.ModuleDict())
    parts['text']['embeddings'] = nn.Embedding(2, 2)
    parts['roi_head'] = nn.ModuleDict(dict(bbox_head=nn.Linear(2, 2)))
    model = nn.ModuleDict(parts)
    weights = {**model.state_dict(), key: torch.ones(1)}
    if fits:
        return load_weights(model, weights)
    with pytest.raises(CheckpointError, match=f'is of another model: it has {key}'):
        load_weights(model, weights)


@pytest.mark.parametrize('kind', ['mmpretrain.VisionTransformer', 'RePaVisionTransformer'])
def test_checkpoints_with_the_weights_of_lora_alone(kind, randomize, tmp_path):
    """As MMPretrain's LoRAModel writes them. Its base starts from a file of its own."""
    arch = dict(embed_dims=8, num_layers=2, num_heads=1, feedforward_channels=16)
    base, path = dict(type=kind, arch=arch, img_size=32), str(tmp_path / 'base.pth')
    torch.save(randomize(MODELS.build(base)).state_dict(), path)
    base['init_cfg'] = dict(type='Pretrained', checkpoint=path)
    lora = dict(type='mmpretrain.LoRAModel', module=base, rank=2, targets=[dict(type='qkv')])

    def build():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Sequential(MODELS.build(copy.deepcopy(lora)), nn.Identity()).eval()

    model, x = build(), torch.randn(1, 3, 32, 32)
    for name, parameter in model.named_parameters():
        if '.lora_up.' in name:
            nn.init.normal_(parameter)
    weights, expected = model.state_dict(), model(x)
    assert all('.lora_' in key for key in weights)
    for load in (load_weights, load_state_dict):
        load(found := build(), weights)
        assert torch.equal(found(x)[0], expected[0])
    del weights['0.module.layers.1.attn.qkv.lora_up.weight']
    with pytest.raises(CheckpointError, match='it lacks 0.module.layers.1.attn.qkv.lora_up'):
        load_weights(build(), weights)


def test_tables_that_a_swin_v2_computes_may_be_missing(randomize):
    arch = dict(embed_dims=8, depths=[1], num_heads=[1], extra_norm_every_n_blocks=0)
    model, other = (
        SwinTransformerV2(arch, img_size=32, window_size=4, out_indices=(0,)) for _ in range(2)
    )
    weights = randomize(model).state_dict()
    load_weights(other, dict(weights), 'swin.pth')
    for name, value in other.named_parameters():
        assert torch.equal(value, weights[name])
    name = next(key for key in weights if 'ffn' in key)
    del weights[name]
    with pytest.raises(CheckpointError, match=f'swin.pth is of another model: it lacks {name}'):
        load_weights(other, weights, 'swin.pth')
