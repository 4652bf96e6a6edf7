"""Checkpoints of LV-ViTs of the code of RePaFormer's authors."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mmengine.registry import MODELS

from projects.lvvit import TokenLabelHead
from repa_mm import reparameterize
from repa_mm.authors import translate
from repa_mm.checkpoints import load_weights
from repa_mm.config import load_config
from repa_mm.reparam import CheckpointError
from tests.test_authors import Layout, attention, ffn, linear, norm

CONFIG = Path(__file__).parents[1] / 'configs' / 'repa_lvvit_s_in1k.py'


def lvvit_layout(form):
    w = Layout(form, ratio=2 / 3, expansion=3)
    w.add('cls_token', 1, 1, 16)
    w.add('pos_embed', 1, 5, 16)
    for i, (c, k) in enumerate(((3, 7), (64, 3), (64, 3)), 1):
        w.linear(f'patch_embed.conv{i}', 64, c, k, k, bias=False)
        w.norm(f'patch_embed.bn{i}', 64, batch=True)
    w.linear('patch_embed.proj', 16, 64, 4, 4)
    for i in range(2):
        w.norm(f'blocks.{i}.norm1', 16)
        w.linear(f'blocks.{i}.attn.qkv', 48, 16, bias=False)
        w.linear(f'blocks.{i}.attn.proj', 16, 16)
        w.ffn(f'blocks.{i}.mlp', 16)
    w.norm('norm', 16)
    w.linear('head', 5, 16)
    w.linear('aux_head', 5, 16)
    return w.weights


def lvvit(w, x):
    for i, stride in enumerate((2, 1, 1), 1):
        weight = w[f'patch_embed.conv{i}.weight']
        x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
        x = norm(w, f'patch_embed.bn{i}', x.permute(0, 2, 3, 1)).relu()
        x = x.permute(0, 3, 1, 2)
    x = (
        F.conv2d(x, w['patch_embed.proj.weight'], w['patch_embed.proj.bias'], stride=4)
        .flatten(2)
        .transpose(1, 2)
    )
    x = torch.cat([w['cls_token'].expand(len(x), 1, 16), x], 1)
    x = x + w['pos_embed']
    for i in range(2):
        b = f'blocks.{i}'
        x = x + attention(w, f'{b}.attn', norm(w, f'{b}.norm1', x), 4) / 2
        x = ffn(w, f'{b}.mlp', x, active=1 / 3, scale=0.5)
    x = norm(w, 'norm', x)
    return linear(w, 'head', x[:, 0]) + linear(w, 'aux_head', x[:, 1:]).amax(1) / 2


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
    weights = lvvit_layout(form)
    before = {k: v.clone() for k, v in weights.items()}
    done = translate(weights, cfg)
    assert all(torch.equal(weights[key], value) for key, value in before.items())
    x = torch.randn(2, 3, 16, 16)
    backbone, head = MODELS.build(cfg).eval(), TokenLabelHead(5, 16)
    load_weights(backbone, part(done, 'backbone.'))
    head.load_state_dict(part(done, 'head.'))
    with torch.no_grad():
        for model in (backbone, reparameterize(backbone) if form == 'training' else backbone):
            assert relative_error(head(model(x)), lvvit(weights, x)) < 1e-5


def test_what_the_authors_merge_is_refused(cfg):
    """It has a norm that its training form has not."""
    w = Layout('deploy')
    w.weights.update(lvvit_layout('deploy'))
    for i in range(2):
        w.norm(f'blocks.{i}.mlp.norm', 16, batch=True)
    with pytest.raises(CheckpointError, match='(?s)layers.0.ffn'):
        translate(w.weights, cfg)
