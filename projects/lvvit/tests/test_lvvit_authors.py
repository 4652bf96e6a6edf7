"""Checkpoints of LV-ViTs of the code of RePaFormer's authors."""

from pathlib import Path

import pytest
import torch
from mmengine.registry import MODELS

from projects.lvvit import TokenLabelHead
from repa_mm import reparameterize
from repa_mm.io.checkpoints import load_weights
from repa_mm.io.configs import load_config
from repa_mm.io.layouts import translate
from repa_mm.reparam import CheckpointError
from tests.test_io.test_layouts import Net

CONFIG = Path(__file__).parents[1] / 'configs' / 'repa_lvvit_s_in1k.py'


def lvvit(net, x):
    for i, (stride, size) in enumerate(((2, 7), (1, 3), (1, 3)), 1):
        name = f'patch_embed.conv{i}'
        x = net.conv(x, name, 64, size, bias=False, stride=stride, padding=size // 2)
        x = net.norm(x.permute(0, 2, 3, 1), f'patch_embed.bn{i}', batch=True).relu()
        x = x.permute(0, 3, 1, 2)
    x = net.conv(x, 'patch_embed.proj', 16, 4, stride=4)
    x = net.tokens(x.flatten(2).transpose(1, 2))
    for i in range(2):
        b = f'blocks.{i}'
        u = net.attention(net.norm(x, f'{b}.norm1'), f'{b}.attn', 4, qkv_bias=False)
        x = net.ffn(x + u / 2, f'{b}.mlp', scale=0.5)
    x = net.norm(x, 'norm')
    classes, patches = net.linear(x[:, 0], 'head', 5), net.linear(x[:, 1:], 'aux_head', 5)
    return classes + patches.amax(1) / 2


def made(form):
    """Weights in the authors' layout, images, and the logits of the authors' code."""
    net, x = Net(form, ratio=2 / 3, expansion=3), torch.randn(2, 3, 16, 16)
    return net, x, lvvit(net, x)


@pytest.fixture
def cfg():
    """The config of a small backbone."""
    arch = dict(embed_dims=16, num_layers=2, num_heads=4, feedforward_channels=48)
    backbone = load_config(str(CONFIG)).model.backbone.to_dict()
    return {**backbone, 'arch': arch, 'img_size': 16, 'patch_size': 8}


def part(weights, name):
    return {k[len(name) :]: v for k, v in weights.items() if k.startswith(name)}


@pytest.mark.parametrize('form', ['training', 'deploy'])
def test_same_logits(form, cfg, relative_error):
    net, x, expected = made(form)
    weights = net.weights
    before = {k: v.clone() for k, v in weights.items()}
    done = translate(weights, cfg)
    assert all(torch.equal(weights[key], value) for key, value in before.items())
    backbone, head = MODELS.build(cfg).eval(), TokenLabelHead(5, 16)
    load_weights(backbone, part(done, 'backbone.'))
    head.load_state_dict(part(done, 'head.'))
    with torch.no_grad():
        for model in (backbone, reparameterize(backbone) if form == 'training' else backbone):
            assert relative_error(head(model(x)), expected) < 1e-5


def test_what_the_authors_merge_is_refused(cfg):
    """It has a norm that its training form has not."""
    net, *_ = made('deploy')
    for i in range(2):
        net.norm(torch.ones(1, 16), f'blocks.{i}.mlp.norm', batch=True)
    with pytest.raises(CheckpointError, match='(?s)layers.0.ffn'):
        translate(net.weights, cfg)
