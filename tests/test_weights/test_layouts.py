"""Checkpoints in the layouts of others."""

import argparse
import copy
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mmengine.registry import MODELS

import repa_mm
from repa_mm.reparam import ChannelIdleFFN, CheckpointError, reparameterize
from repa_mm.run import calibrate_checkpoint, load_config
from repa_mm.weights.layouts import (
    estimate_idle_ratio,
    mm_to_repavit,
    repavit_to_mm,
    to_mm,
    to_mmpretrain,
    to_repavit,
)

ROOT = Path(repa_mm.__file__).resolve().parents[1]


# Models in the layout of the authors' repository: a state dict of random
# numbers, and what their code computes with it, written out.


class Layout:
    """Collects names and shapes."""

    def __init__(self, form, ratio=0.75, expansion=4, conv=False):
        self.weights = {}
        self.form, self.ratio = form, ratio
        self.expansion, self.conv = expansion, conv
        self.generator = torch.Generator().manual_seed(7)

    def add(self, name, *shape, low=-0.5, high=0.5):
        noise = torch.rand(shape, generator=self.generator)
        self.weights[name] = noise * (high - low) + low

    def linear(self, name, *shape, bias=True):
        bound = torch.Size(shape[1:]).numel() ** -0.5
        self.add(f'{name}.weight', *shape, low=-2 * bound, high=2 * bound)
        if bias:
            self.add(f'{name}.bias', shape[0])

    def norm(self, name, channels, batch=False):
        self.add(f'{name}.weight', channels, low=0.3, high=1.5)
        self.add(f'{name}.bias', channels)
        if batch:
            self.add(f'{name}.running_mean', channels, low=-1, high=1)
            self.add(f'{name}.running_var', channels, low=0.1, high=3)
            self.weights[f'{name}.num_batches_tracked'] = torch.tensor(9)

    def ffn(self, name, c):
        h = c * self.expansion
        a = round(h * (1 - self.ratio))
        tail = (1, 1) if self.conv else ()
        if self.form == 'vanilla':
            self.norm(f'{name.rpartition(".")[0]}.norm2', c)
            self.linear(f'{name}.fc1', h, c)
            self.linear(f'{name}.fc2', c, h)
            return
        if self.form == 'training':
            self.norm(f'{name}.norm1', c, batch=True)
            self.linear(f'{name}.fc1', h, c, *tail)
            self.norm(f'{name}.norm2', h, batch=True)
            self.linear(f'{name}.fc2', c, h, *tail)
            return
        self.linear(f'{name}.fc1', c, c, *tail)
        if a == h:
            self.weights[f'{name}.fc1.weight'] = torch.eye(c).view(c, c, *tail)
        if a:
            self.linear(f'{name}.fc2', a, c, *tail)
            self.linear(f'{name}.fc3', c, a, *tail, bias=False)


def norm(w, name, x, eps=1e-5):
    """BatchNorm with its running statistics, or LayerNorm; channels last."""
    if f'{name}.running_mean' in w:
        x = (x - w[f'{name}.running_mean']) / (w[f'{name}.running_var'] + eps).sqrt()
    else:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + eps).sqrt()
    return x * w[f'{name}.weight'] + w[f'{name}.bias']


def linear(w, name, x):
    weight = w[f'{name}.weight']
    y = x @ weight.reshape(weight.shape[0], -1).T
    return y + w[f'{name}.bias'] if f'{name}.bias' in w else y


def ffn(w, name, x, active=0.25, scale=1.0):
    """Of the authors, in either form, or of a vanilla block. x is (..., C)."""
    vanilla_norm = f'{name.rpartition(".")[0]}.norm2'
    if f'{vanilla_norm}.weight' in w:
        h = F.gelu(linear(w, f'{name}.fc1', norm(w, vanilla_norm, x)))
        return x + linear(w, f'{name}.fc2', h)
    if f'{name}.norm1.weight' not in w:
        y = linear(w, f'{name}.fc1', x)
        if f'{name}.fc2.weight' in w:
            y = y + linear(w, f'{name}.fc3', F.gelu(linear(w, f'{name}.fc2', x)))
        return y
    # LV-ViT's sees the tokens without the residual scale.
    h = linear(w, f'{name}.fc1', norm(w, f'{name}.norm1', x / scale))
    a = round(h.shape[-1] * active)
    h = torch.cat([F.gelu(h[..., :a]), h[..., a:]], -1)
    z = linear(w, f'{name}.fc2', norm(w, f'{name}.norm2', h))
    return x + scale * z * w.get(f'{name}.ls', torch.ones(()))


def attention(w, name, x, heads, bias=0.0):
    """x is (B, N, C)."""
    b, n, c = x.shape
    q, k, v = linear(w, f'{name}.qkv', x).view(b, n, 3, heads, c // heads).permute(2, 0, 3, 1, 4)
    p = (q @ k.transpose(2, 3) * (c // heads) ** -0.5 + bias).softmax(-1)
    return linear(w, f'{name}.proj', (p @ v).transpose(1, 2).reshape(b, n, c))


def vit_layout(form, **kwargs):
    w = Layout(form, **kwargs)
    w.add('cls_token', 1, 1, 16)
    w.add('pos_embed', 1, 5, 16)
    w.linear('patch_embed.proj', 16, 3, 8, 8, bias=False)
    w.norm('norm_pre', 16)
    for i in range(2):
        w.norm(f'blocks.{i}.attn.norm', 16)
        w.linear(f'blocks.{i}.attn.qkv', 48, 16)
        w.linear(f'blocks.{i}.attn.proj', 16, 16)
        w.ffn(f'blocks.{i}.mlp', 16)
    w.norm('norm', 16)
    w.linear('head', 5, 16)
    return w.weights


def vit(w, x):
    x = F.conv2d(x, w['patch_embed.proj.weight'], stride=8)
    x = x.flatten(2).transpose(1, 2)
    x = torch.cat([w['cls_token'].expand(len(x), 1, 16), x], 1)
    x = norm(w, 'norm_pre', x + w['pos_embed'], 1e-6)
    for i in range(2):
        b = f'blocks.{i}'
        x = x + attention(w, f'{b}.attn', norm(w, f'{b}.attn.norm', x), 4)
        x = ffn(w, f'{b}.mlp', x)
    return linear(w, 'head', norm(w, 'norm', x, 1e-6)[:, 0])


def lvvit_layout(form, **kwargs):
    w = Layout(form, expansion=3, **kwargs)
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


SWIN_DEPTHS = (2, 1, 2, 1)


def swin_layout(form, dims=8, depths=SWIN_DEPTHS, window=2, num_heads=1, **kwargs):
    w = Layout(form, **kwargs)
    w.linear('patch_embed.proj', dims, 3, 4, 4)
    w.norm('patch_embed.norm', dims)
    for i, depth in enumerate(depths):
        c = dims * 2**i
        for j in range(depth):
            b = f'layers.{i}.blocks.{j}'
            w.norm(f'{b}.norm1', c)
            table = (2 * window - 1) ** 2, num_heads * 2**i
            w.add(f'{b}.attn.relative_position_bias_table', *table)
            w.linear(f'{b}.attn.qkv', 3 * c, c)
            w.linear(f'{b}.attn.proj', c, c)
            w.ffn(f'{b}.mlp', c)
        if i < 3:
            w.norm(f'layers.{i}.downsample.norm', 4 * c)
            w.linear(f'layers.{i}.downsample.reduction', 2 * c, 4 * c, bias=False)
    w.norm('norm', c)
    w.linear('head', 5, c)
    return w.weights


def swin(w, x):
    """On 64x64 images, windows of 2x2."""
    x = F.conv2d(x, w['patch_embed.proj.weight'], w['patch_embed.proj.bias'], stride=4).permute(
        0, 2, 3, 1
    )
    x = norm(w, 'patch_embed.norm', x)
    for i, depth in enumerate(SWIN_DEPTHS):
        for j in range(depth):
            b = f'layers.{i}.blocks.{j}'
            side = x.shape[1]
            shift = 1 if j % 2 and side > 2 else 0
            # Every pair of tokens by its own: who shares a window, how far
            # apart they are, and whether the shift has wrapped between them.
            place = torch.arange(side)
            moved = (place - shift) % side
            y0, x0 = (m.flatten() for m in torch.meshgrid(moved, moved, indexing='ij'))
            dy, dx = y0[:, None] - y0, x0[:, None] - x0
            same = (y0[:, None] // 2 == y0 // 2) & (x0[:, None] // 2 == x0 // 2)
            yt, xt = (m.flatten() for m in torch.meshgrid(place, place, indexing='ij'))
            for d, t in ((dy, yt), (dx, xt)):
                same &= (t[:, None] - t) == d
            index = ((dy + 1) * 3 + dx + 1).clamp(0, 8)
            table = w[f'{b}.attn.relative_position_bias_table']
            bias = table[index].permute(2, 0, 1).masked_fill(~same, -1e9)
            tokens = x.flatten(1, 2)
            tokens = tokens + attention(w, f'{b}.attn', norm(w, f'{b}.norm1', tokens), 2**i, bias)
            x = ffn(w, f'{b}.mlp', tokens).view(x.shape)
        if i < 3:
            x = torch.cat([x[:, p::2, q::2] for q in (0, 1) for p in (0, 1)], -1)
            x = linear(
                w, f'layers.{i}.downsample.reduction', norm(w, f'layers.{i}.downsample.norm', x)
            )
    return linear(w, 'head', norm(w, 'norm', x).mean((1, 2)))


def poolformer_layout(form, **kwargs):
    w = Layout(form, conv=True, **kwargs)
    w.linear('patch_embed.proj', 8, 3, 7, 7)
    for i, c in enumerate((8, 16, 24, 32)):
        for j in range(2 if i == 1 else 1):
            b = f'network.{2 * i}.{j}'
            w.norm(f'{b}.norm1', c)
            w.ffn(f'{b}.mlp', c)
            w.add(f'{b}.layer_scale_1', c)
            if form == 'training':
                w.add(f'{b}.mlp.ls', c)
        if i < 3:
            w.linear(f'network.{2 * i + 1}.proj', 8 * (i + 2), c, 3, 3)
    w.norm('norm', 32)
    w.linear('head', 5, 32)
    return w.weights


def poolformer(w, x):
    def group_norm(name, x):
        return F.group_norm(x, 1, w[f'{name}.weight'], w[f'{name}.bias'])

    x = F.conv2d(x, w['patch_embed.proj.weight'], w['patch_embed.proj.bias'], stride=4, padding=2)
    for i in range(4):
        for j in range(2 if i == 1 else 1):
            b = f'network.{2 * i}.{j}'
            u = group_norm(f'{b}.norm1', x)
            mixed = F.avg_pool2d(u, 7, 1, 3, count_include_pad=False) - u
            x = x + w[f'{b}.layer_scale_1'][:, None, None] * mixed
            x = ffn(w, f'{b}.mlp', x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        if i < 3:
            d = f'network.{2 * i + 1}.proj'
            x = F.conv2d(x, w[f'{d}.weight'], w[f'{d}.bias'], stride=2, padding=1)
    return linear(w, 'head', group_norm('norm', x).mean((2, 3)))


def mixer_layout(form, **kwargs):
    w = Layout(form, **kwargs)
    w.linear('stem.proj', 16, 3, 16, 16)
    for i in range(2):
        w.norm(f'blocks.{i}.mlp_tokens.norm', 4)
        w.linear(f'blocks.{i}.mlp_tokens.fc1', 8, 4)
        w.linear(f'blocks.{i}.mlp_tokens.fc2', 4, 8)
        w.ffn(f'blocks.{i}.mlp_channels', 16)
    w.norm('norm', 16)
    w.linear('head', 5, 16)
    return w.weights


def mixer(w, x):
    x = (
        F.conv2d(x, w['stem.proj.weight'], w['stem.proj.bias'], stride=16)
        .flatten(2)
        .transpose(1, 2)
    )
    for i in range(2):
        t = f'blocks.{i}.mlp_tokens'
        u = norm(w, f'{t}.norm', x.transpose(1, 2))
        u = linear(w, f'{t}.fc2', F.gelu(linear(w, f'{t}.fc1', u)))
        x = ffn(w, f'blocks.{i}.mlp_channels', x + u.transpose(1, 2))
    return linear(w, 'head', norm(w, 'norm', x, 1e-6).mean(1))


# Layout, what it computes, the size of the images, the config it takes where
# shapes do not tell all, and the idle ratio.
VIT = dict(embed_dims=16, num_layers=2, num_heads=4, feedforward_channels=64)
CONFIGS = dict(
    vit=('repa_deit_t_in1k', dict(arch=VIT, img_size=16, patch_size=8)),
    lvvit=(
        'repa_lvvit_s_in1k',
        dict(arch=dict(VIT, feedforward_channels=48), img_size=16, patch_size=8),
    ),
    poolformer=(
        'repa_poolformer_s12_in1k',
        dict(
            arch=dict(
                layers=[1, 2, 1, 1],
                embed_dims=[8, 16, 24, 32],
                mlp_ratios=[4] * 4,
                layer_scale_init_value=1e-5,
            )
        ),
    ),
)
FAMILIES = dict(
    swin=(swin_layout, swin, 64, 0.75),
    vit=(vit_layout, vit, 16, 0.75),
    lvvit=(lvvit_layout, lvvit, 16, 2 / 3),
    poolformer=(poolformer_layout, poolformer, 64, 0.75),
    mixer=(mixer_layout, mixer, 32, 0.75),
)


@pytest.fixture
def config_of(tmp_path):
    """Path of the config of a small architecture; None if not needed."""

    def write(family, **kwargs):
        if family not in CONFIGS:
            return None
        base, backbone = CONFIGS[family]
        cfg = load_config(repa_mm.config_path(base))
        cfg.model.backbone.update(copy.deepcopy(dict(backbone, **kwargs)))
        path = str(tmp_path / f'{family}.py')
        cfg.dump(path)
        return path

    return write


def run(done, x):
    """Logits of a converted checkpoint, loaded strictly."""
    backbone = MODELS.build(dict(done.backbone)).eval()
    weights = done.state_dict
    backbone.load_state_dict(
        {k[9:]: v for k, v in weights.items() if k.startswith('backbone.')}, strict=True
    )
    with torch.no_grad():
        out = backbone(x)[-1]
    if 'head.aux_fc.weight' in weights:
        return (
            linear(weights, 'head.fc', out[0][:, 0])
            + linear(weights, 'head.aux_fc', out[0][:, 1:]).amax(1) / 2
        )
    if out.ndim == 4:
        out = out.mean((2, 3))
    elif out.ndim == 3:
        out = out.mean(2)
    return linear(weights, 'head.fc', out)


@pytest.mark.parametrize('form', ['training', 'deploy'])
@pytest.mark.parametrize('family', FAMILIES)
def test_same_logits_and_back(family, form, config_of, relative_error):
    layout, forward, size, ratio = FAMILIES[family]
    weights = layout(form, ratio=ratio)
    before = {k: v.clone() for k, v in weights.items()}
    done = to_mm(weights, config_of(family))
    assert (done.form, done.left_out, done.fresh) == (form, [], [])
    assert done.idle_ratio == pytest.approx(ratio)
    x = torch.randn(2, 3, size, size)
    assert relative_error(run(done, x), forward(weights, x)) < 1e-5

    back = to_repavit(done.state_dict, config_of(family), img_size=size)
    buffers = {k for k in back.state_dict if 'attn_mask' in k or '_index' in k}
    assert set(back.state_dict) - buffers == set(weights)
    for key, value in before.items():
        assert torch.equal(weights[key], value), key  # untouched
        assert torch.equal(back.state_dict[key], value), key
    # What is merged here is what the layout means by merged.
    if form == 'training':
        backbone = MODELS.build(dict(done.backbone))
        backbone.load_state_dict(
            {k[9:]: v for k, v in done.state_dict.items() if k.startswith('backbone.')}
        )
        merged = {f'backbone.{k}': v for k, v in reparameterize(backbone).state_dict().items()}
        merged.update({k: v for k, v in done.state_dict.items() if k.startswith('head')})
        merged = to_repavit(merged, config_of(family), size).state_dict
        assert relative_error(forward(merged, x), forward(weights, x)) < 1e-5


def test_merged_lvvit_of_the_authors_is_refused(config_of):
    """It has a norm that their training form has not, and lacks a factor."""
    w = Layout('deploy', ratio=2 / 3, expansion=3)
    w.weights.update(lvvit_layout('deploy', ratio=2 / 3))
    for i in range(2):
        w.norm(f'blocks.{i}.mlp.norm', 16, batch=True)
    with pytest.raises(CheckpointError, match='blocks.0.mlp.fc3.*training'):
        to_mm(w.weights, config_of('lvvit'))


@pytest.mark.parametrize('ratio', [0.0, 1.0])
def test_extreme_idle_ratios_in_the_deploy_form(ratio, config_of, relative_error):
    weights = vit_layout('deploy', ratio=ratio)
    done = to_mm(weights, config_of('vit'))
    assert done.idle_ratio == ratio
    x = torch.randn(2, 3, 16, 16)
    assert relative_error(run(done, x), vit(weights, x)) < 1e-5
    back = to_repavit(done.state_dict, config_of('vit')).state_dict
    assert set(back) == set(weights)
    assert all(torch.equal(back[k], v) for k, v in weights.items())


def test_swin_buffers_of_the_original():
    """Numbers for an 8x8 map of 4x4 windows, by the original's definition."""
    done = to_mm(swin_layout('training'))
    buffers = to_repavit(done.state_dict, img_size=64).state_dict
    index = buffers['layers.0.blocks.0.attn.relative_position_index']
    assert index.tolist() == [[4, 3, 1, 0], [5, 4, 2, 1], [7, 6, 4, 3], [8, 7, 5, 4]]
    masks = {k for k in buffers if 'attn_mask' in k}
    assert masks == {'layers.0.blocks.1.attn_mask', 'layers.2.blocks.1.attn_mask'}
    mask = buffers['layers.2.blocks.1.attn_mask']  # a 4x4 map
    assert mask.shape == (4, 4, 4)
    assert (mask[0] == 0).all()
    right = torch.tensor([[0.0, -100.0], [-100.0, 0.0]])
    assert torch.equal(mask[1], right.repeat(2, 2))
    assert torch.equal(mask[2], right.repeat_interleave(2, 0).repeat_interleave(2, 1))
    assert torch.equal(mask[3], -100.0 * (1 - torch.eye(4)))


def test_named_architectures():
    """By its shapes alone, without building one here."""
    weights = swin_layout('deploy', 96, (2, 2, 6, 2), window=7, num_heads=3)
    done = to_mm({k: v for k, v in weights.items() if not k.startswith('head')})
    assert done.config == 'repa_swin_t_in1k.py'
    assert done.backbone['arch'] == 'tiny' and done.backbone['deploy']
    assert done.idle_ratio == 0.75
    assert not any(k.startswith('head') for k in done.state_dict)


# Files: what else is in them, what they are wrapped in, what is wrong.


def test_safetensors(tmp_path):
    save_file = pytest.importorskip('safetensors.torch').save_file
    src, dst = str(tmp_path / 'model.safetensors'), str(tmp_path / 'dst.pth')
    weights = swin_layout('training')
    save_file(weights, src)
    done = repavit_to_mm(src, dst)
    expected = to_mm(weights).state_dict
    assert set(done.state_dict) == set(expected)
    assert all(torch.equal(done.state_dict[k], v) for k, v in expected.items())

    os.unlink(dst)
    content = open(src, 'rb').read()
    for damaged in (content[:-9], b'', b'\xff' * 64, b'PK' + content):
        with open(src, 'wb') as file:
            file.write(damaged)
        with pytest.raises(CheckpointError, match='not a readable safetens'):
            repavit_to_mm(src, dst)
    save_file({}, src)
    with pytest.raises(CheckpointError, match='no (tensor|state dict)'):
        repavit_to_mm(src, dst)
    assert not os.path.exists(dst)


def test_full_checkpoint_with_arguments_and_averages(tmp_path):
    weights, average = (swin_layout('training') for _ in range(2))
    average['norm.weight'] = average['norm.weight'] + 1
    args = argparse.Namespace(idle_ratio=0.3, channel_idle=True, heuristic='static', device='cuda')
    src, dst = str(tmp_path / 'src.pth'), str(tmp_path / 'dst.pth')
    torch.save(
        dict(
            model={f'module.{k}': v for k, v in weights.items()},
            model_ema=average,
            epoch=299,
            args=args,
            scaler=dict(scale=1.0),
            optimizer=dict(state={0: dict(step=torch.tensor(1))}, param_groups=[dict(lr=1e-3)]),
        ),
        src,
    )
    done = repavit_to_mm(src, dst)
    # ceil(32 * 0.7) = 23 active channels of 32, and so on.
    assert done.idle_ratio_from == "the checkpoint's arguments"
    model = MODELS.build(dict(done.backbone))
    active = [m.num_active for m in model.modules() if isinstance(m, ChannelIdleFFN)]
    assert active == [23, 23, 45, 90, 90, 180]
    saved = torch.load(dst, weights_only=True)
    assert set(saved) == {'meta', 'state_dict'}
    assert torch.equal(saved['state_dict']['backbone.norm3.weight'], weights['norm.weight'])
    done = repavit_to_mm(src, dst, ema=True)
    assert torch.equal(done.state_dict['backbone.norm3.weight'], average['norm.weight'])

    torch.save(dict(model=weights), src)
    with pytest.raises(CheckpointError, match='no averaged weights'):
        repavit_to_mm(src, dst, ema=True)
    assert repavit_to_mm(src, dst).idle_ratio_from == 'assumption'
    assert repavit_to_mm(src, dst, idle_ratio=[0.5]).idle_ratio == 0.5
    with pytest.raises(ValueError, match='2 idle ratios .* 6 FFNs'):
        repavit_to_mm(src, dst, idle_ratio=[0.5, 0.25])


def test_linear_idle_ratios_of_the_arguments(config_of):
    args = dict(idle_ratio=0.75, channel_idle=True, heuristic='linear')
    weights = vit_layout('training')
    done = to_mm(weights, config_of('vit', idle_schedule='linear'), args=args)
    assert done.idle_ratio == [1.0, 0.0]
    with pytest.raises(ValueError, match='idle ratio.*by.*config'):
        to_mm(weights, config_of('vit'), args=args)


def test_merged_with_linear_idle_ratios(config_of):
    """Whose config says so, in both directions."""
    weights = vit_layout('deploy', ratio=0.0)
    merged = vit_layout('deploy', ratio=1.0)
    ffn = [k for k in weights if k.startswith('blocks.0.mlp.')]
    weights = {k: v for k, v in weights.items() if k not in ffn}
    weights.update({k: v for k, v in merged.items() if k.startswith('blocks.0.mlp.')})
    config = config_of('vit', idle_schedule='linear')
    done = to_mm(weights, config)
    assert done.idle_ratio == [1.0, 0.0]
    back = to_repavit(done.state_dict, config)
    assert back.idle_ratio == [1.0, 0.0]
    assert all(torch.equal(back.state_dict[k], v) for k, v in weights.items())


def test_idle_ratio_that_statistics_tell(relative_error):
    """After a training, with a learning rate that has come down."""
    ffns = torch.nn.Sequential(*[ChannelIdleFFN(16, 64, idle_ratio=0.625) for _ in range(4)])
    ffns.train()
    optimizer = torch.optim.SGD(ffns.parameters(), lr=0.05)
    for step in range(60):
        if step == 30:
            optimizer.param_groups[0]['lr'] = 1e-3
        x = torch.randn(8, 32, 16) * torch.linspace(0.5, 2, 16)
        loss = (ffns(x) - x.roll(1, -1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    names = [str(i) for i in range(4)]
    assert estimate_idle_ratio(ffns.state_dict(), names) == 0.625
    weights = ffns.state_dict()
    weights['2.norm2.running_mean'] = torch.rand(64) * 10
    assert estimate_idle_ratio(weights, names) is None


def bad(change, form='training'):
    weights = vit_layout(form)
    change(weights)
    return weights


def replaced(key, value):
    return lambda w: w.update({key: value})


@pytest.mark.parametrize(
    'weights, message',
    [
        (dict(a=torch.ones(1)), "no known architecture.*'a'"),
        (bad(lambda w: w.pop('blocks.1.mlp.fc2.weight')), 'incomplete.*layers.1.ffn.fc2.weight'),
        (bad(lambda w: w.pop('norm_pre.bias')), 'incomplete.*pre_norm.bias'),
        (bad(replaced('blocks.0.gate.weight', torch.ones(1))), "unknown: 'blocks.0.gate.weight'"),
        (
            bad(replaced('blocks.0.mlp.gate.weight', torch.ones(1))),
            "no place for 'blocks.0.mlp.gate.weight'",
        ),
        (
            bad(replaced('blocks.1.attn.qkv.bias', torch.ones(3))),
            r"'blocks.1.attn.qkv.bias' has shape \(3,\), expected is \(48,\)",
        ),
        (
            bad(lambda w: [w.pop(k) for k in list(w) if k.startswith('blocks.1.mlp.norm')]),
            'incomplete.*layers.1.ffn.norm1.weight',
        ),
        (
            bad(lambda w: [w.pop(k) for k in list(w) if k.startswith('blocks.1.')]),
            'incomplete.*layers.1.',
        ),
        (bad(replaced('pos_embed', torch.ones(5, 16))), r"'pos_embed' has shape \(5, 16\)"),
        (
            bad(replaced('blocks.0.mlp.fc1.running_mean', torch.ones(1)), 'deploy'),
            "no place for 'blocks.0.mlp.fc1.running_mean'",
        ),
        (bad(lambda w: w.pop('blocks.1.mlp.fc3.weight'), 'deploy'), "layers.1.ffn.*'fc3.weight'"),
        (
            bad(replaced('blocks.1.mlp.fc2.weight', torch.ones(16, 5)), 'deploy'),
            'layers.1.ffn is .*damaged',
        ),
        (
            bad(replaced('blocks.1.mlp.fc1.weight', torch.ones(16)), 'deploy'),
            'layers.1.ffn is .*damaged',
        ),
        ({k: v for k, v in vit_layout('training').items() if '.mlp.' not in k}, 'no FFN'),
        (bad(replaced('norm.bias', torch.full((16,), torch.nan))), "'ln1.bias' .*not finite"),
        (vit_layout('deploy', ratio=-0.5), 'layers.0.ffn .* width is not 64'),
    ],
)
def test_what_is_refused(weights, message, config_of):
    with pytest.raises(CheckpointError, match=message):
        to_mm(weights, config_of('vit'))


def test_what_shapes_do_not_tell_and_wrong_configs(config_of):
    with pytest.raises(CheckpointError, match='give a --config'):
        to_mm(vit_layout('training'))
    with pytest.raises(ValueError, match='RePaVisionTransformer.*RePaLVViT'):
        to_mm(vit_layout('training'), config_of('lvvit'))
    with pytest.raises(FileNotFoundError, match='no config'):
        to_mm(vit_layout('training'), 'none.py')
    done = to_mm(swin_layout('training'))
    with pytest.raises(CheckpointError, match='layout of RePa-MM already'):
        to_mm(done.state_dict)
    with pytest.raises(CheckpointError, match='no channel-idle FFN'):
        to_repavit(swin_layout('training'))
    merged = to_mm(vit_layout('deploy'), config_of('vit')).state_dict
    for key in ('fc1.weight', 'fc1.bias'):
        key = f'backbone.layers.1.ffn.{key}'
        merged[key] = torch.cat([merged[key]] * 4)
    with pytest.raises(CheckpointError, match='layers.1.ffn .* 112 active channels, and 64 hidden'):
        to_repavit(merged, config_of('vit'))
    with pytest.raises(CheckpointError, match='vanilla PoolFormer'):
        weights = poolformer_layout('training')
        to_mm(
            {
                k.replace('mlp.norm1', 'norm2'): v
                for k, v in weights.items()
                if 'running' not in k and 'num_b' not in k and 'mlp.norm2' not in k
            }
        )


def test_a_failure_leaves_the_output_alone(tmp_path):
    src, dst = tmp_path / 'src.pth', tmp_path / 'dst.pth'
    dst.write_text('precious')
    torch.save(dict(model=dict(a=torch.ones(1))), src)
    for convert in (repavit_to_mm, mm_to_repavit):
        with pytest.raises(CheckpointError):
            convert(str(src), str(dst))
    src.write_bytes(src.read_bytes()[:200])
    with pytest.raises(CheckpointError):
        repavit_to_mm(str(src), str(dst))
    with pytest.raises(FileNotFoundError):
        repavit_to_mm('none.pth', str(dst))
    torch.save(swin_layout('training'), src)
    with pytest.raises(ValueError, match='is the input'):
        repavit_to_mm(str(src), str(src))
    assert dst.read_text() == 'precious'
    assert {p.name for p in tmp_path.iterdir()} == {'src.pth', 'dst.pth'}


class Hostile:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, 'w')


def test_arguments_are_not_run(tmp_path):
    src, owned = tmp_path / 'src.pth', tmp_path / 'owned'
    torch.save(
        dict(model=swin_layout('training'), args=argparse.Namespace(evil=Hostile(owned))), src
    )
    with pytest.raises(CheckpointError, match='hostile'):
        repavit_to_mm(str(src), str(tmp_path / 'dst.pth'))
    assert not owned.exists() and not (tmp_path / 'dst.pth').exists()


# Vanilla checkpoints.


def vanilla(name, **kwargs):
    torch.manual_seed(3)
    return MODELS.build(dict(type=f'mmpretrain.{name}', **kwargs))


SWIN = dict(arch=dict(embed_dims=8, depths=[2, 1, 2, 1], num_heads=[1, 2, 4, 8]), window_size=2)


def to_timm(key):
    """Names of timm's Swin, whose order in patch merging is another."""
    for old, new in (
        ('stages', 'layers'),
        ('projection', 'proj'),
        ('w_msa.', ''),
        ('ffn.layers.0.0', 'mlp.fc1'),
        ('ffn.layers.1', 'mlp.fc2'),
        ('norm3', 'norm'),
    ):
        key = key.replace(old, new)
    return key


def unfolded_to_concatenated(value):
    """Columns (C, 4) to (4, C), and the neighbours from rows to columns."""
    columns = torch.arange(value.shape[-1]).view(-1, 4)
    return value[..., torch.cat([columns[:, i] for i in (0, 2, 1, 3)])]


@pytest.mark.parametrize('layout', ['mmpretrain', 'mmdet', 'official', 'timm'])
def test_vanilla_swin(layout, randomize):
    outputs = (0, 1, 2, 3) if layout == 'mmdet' else (3,)
    model = randomize(vanilla('SwinTransformer', out_indices=outputs, **SWIN))
    state = dict(model.state_dict())
    expected = {
        f'backbone.{k}': v.clone() for k, v in repa_mm.idle_channels(model).state_dict().items()
    }
    for key in state:
        if '.norm2.' in key:
            expected['backbone.' + key.replace('norm2', 'ffn.norm1')] = state[key]
    head = dict(weight=torch.rand(5, 64), bias=torch.rand(5))
    if layout in ('mmpretrain', 'mmdet'):
        state = {f'backbone.{k}': v for k, v in state.items()}
        name = 'head.fc'
        if layout == 'mmdet':
            state['neck.convs.0.weight'] = torch.ones(1)
            state['bbox_head.fc.weight'] = torch.ones(1)
    else:
        state = {
            to_timm(k): unfolded_to_concatenated(v) if 'downsample' in k else v
            for k, v in state.items()
        }
        name = 'head'
        if layout == 'timm':  # the downsampling begins a stage
            state = {
                k.replace(f'.{k[7]}.', f'.{int(k[7]) + 1}.', 1) if 'downsample' in k else k: v
                for k, v in state.items()
                if 'relative_position_index' not in k
            }
            name = 'head.fc'
    if layout != 'mmdet':
        state.update({f'{name}.{k}': v for k, v in head.items()})
        expected.update({f'head.fc.{k}': v for k, v in head.items()})
    if layout == 'mmdet':
        with pytest.raises(
            CheckpointError,
            match=r'2 weights of bbox_head, neck.*convert_pretrained.*backbone-only',
        ):
            to_mm(state)
    done = to_mm(state, backbone_only=True)
    assert done.form == 'vanilla'
    assert done.left_out == (
        ['neck.convs.0.weight', 'bbox_head.fc.weight'] if layout == 'mmdet' else []
    )
    assert set(done.state_dict) == set(expected)
    for key, value in expected.items():
        assert torch.equal(done.state_dict[key], value), key
    assert {k.rpartition('.')[2] for k in done.fresh} == {
        'weight',
        'bias',
        'running_mean',
        'running_var',
    }
    assert all('.ffn.norm' in k for k in done.fresh)


def test_whole_models_lose_nothing_unasked(tmp_path):
    ours = to_mm(swin_layout('training')).state_dict
    ours = {k: v for k, v in ours.items() if not k.startswith('head')}
    parts = {'decode_head.conv_seg.bias': torch.ones(2)}
    # Statistics of the images are no part that is trained.
    mean = {'data_preprocessor.mean': torch.ones(3)}
    assert to_repavit({**ours, **mean}).left_out == list(mean)
    with pytest.raises(CheckpointError, match='1 weights of decode_head .*--backbone-only'):
        to_repavit({**ours, **parts})
    src, dst = str(tmp_path / 'src.pth'), str(tmp_path / 'dst.pth')
    torch.save(dict(state_dict={**ours, **parts}), src)
    with pytest.raises(CheckpointError, match='decode_head'):
        mm_to_repavit(src, dst)
    assert not os.path.exists(dst)
    assert mm_to_repavit(src, dst, backbone_only=True).left_out == list(parts)
    # What is here already is no case for another tool.
    with pytest.raises(CheckpointError, match='layout of RePa-MM already'):
        to_mm({**ours, **parts})


def swins_of_packages(**kwargs):
    """The same Swin of the three packages; each needs its package."""
    arch = dict(embed_dims=8, depths=SWIN_DEPTHS, num_heads=[1, 2, 4, 8])
    kwargs = dict(window_size=2, **kwargs)
    for package in ('mmpretrain', 'mmdet', 'mmseg'):
        pytest.importorskip(package)
        __import__(f'{package}.models')
        kind = f'{package}.SwinTransformer'
        shape = dict(arch=arch, pad_small_map=True) if package == 'mmpretrain' else arch
        model = MODELS.build(dict(type=kind, **shape, **kwargs))
        model.eval()  # returns None
        yield model


@pytest.mark.parametrize('layout', ['official', 'timm', 'official detector', 'openmmlab'])
def test_swin_of_any_layout_in_three_packages(layout, relative_error):
    weights = swin_layout('vanilla')
    expected = swin(weights, x := torch.randn(2, 3, 64, 64))
    if layout == 'timm':
        weights = {
            re.sub(r'^layers.(\d).down', lambda m: f'layers.{int(m[1]) + 1}.down', k): v
            for k, v in weights.items()
        }
        weights = {k.replace('head.', 'head.fc.'): v for k, v in weights.items()}
    elif layout == 'official detector':
        head = {k: weights.pop(k) for k in ('head.weight', 'head.bias')}
        weights = {
            f'backbone.{k.replace("norm.", "norm3.") if k.startswith("norm.") else k}': v
            for k, v in weights.items()
        }
        weights['neck.convs.0.weight'] = torch.ones(1)
        for i in range(3):
            weights[f'backbone.norm{i}.weight'] = weights[f'backbone.norm{i}.bias'] = torch.ones(
                8 << i
            )
    elif layout == 'openmmlab':
        weights = to_mmpretrain(weights)
    before = dict(weights)
    converted = to_mmpretrain(weights)
    assert weights.keys() == before.keys()
    outputs = (3,)
    if layout == 'official detector':
        assert torch.equal(converted.pop('neck.convs.0.weight'), torch.ones(1))
        converted = {k.removeprefix('backbone.'): v for k, v in converted.items()}
        converted.update({k.replace('head', 'head.fc'): v for k, v in head.items()})
        outputs = (0, 1, 2, 3)
    head = {k: converted.pop(k) for k in list(converted) if k.startswith('head')}
    for model in swins_of_packages(out_indices=outputs):
        model.load_state_dict(converted, strict=True)
        with torch.no_grad():
            out = model(x)[-1]
        assert relative_error(linear(head, 'head.fc', out.mean((2, 3))), expected) < 1e-5


def test_swin_as_mmdetection_converts_it():
    convert = pytest.importorskip('mmdet.models.backbones.swin').swin_converter
    weights = swin_layout('vanilla')
    theirs = {k[9:]: v for k, v in convert(weights).items()}
    ours = {k: v for k, v in to_mmpretrain(weights).items() if 'index' not in k and 'head' not in k}
    theirs['norm3.weight'], theirs['norm3.bias'] = (
        theirs.pop('norm.weight'),
        theirs.pop('norm.bias'),
    )
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert torch.equal(ours[key], value), key


@pytest.mark.parametrize('form', ['training', 'deploy'])
def test_only_a_vanilla_swin_becomes_one_of_mmpretrain(form):
    with pytest.raises(CheckpointError, match="no vanilla Swin has.*'layers.0.blocks.0.mlp."):
        to_mmpretrain(swin_layout(form))


@pytest.mark.parametrize('norm', ['norm2', 'mlp.norm'])
def test_vanilla_lvvit(norm, config_of):
    """TokenLabeling's, and that of the authors' code."""
    given = {
        key.replace('mlp.norm1', norm): value
        for key, value in lvvit_layout('training').items()
        if 'mlp.norm2' not in key
        and not ('mlp.norm1' in key and key.split('.')[-1] not in ('weight', 'bias'))
    }
    done = to_mm(given, config_of('lvvit'))
    assert done.form == 'vanilla' and done.left_out == []
    weights = done.state_dict
    for i in range(2):
        ffn = f'backbone.layers.{i}.ffn'
        for ours, theirs in (
            ('norm1.weight', f'{norm}.weight'),
            ('norm1.bias', f'{norm}.bias'),
            ('fc1.weight', 'mlp.fc1.weight'),
        ):
            assert torch.equal(weights[f'{ffn}.{ours}'], given[f'blocks.{i}.{theirs}'])
        assert (weights[f'{ffn}.norm1.running_mean'] == 0).all()
        assert (weights[f'{ffn}.norm1.running_var'] == 1).all()


@pytest.mark.parametrize('layout', ['mmpretrain', 'timm', 'distilled'])
@pytest.mark.parametrize('pre_norm', [False, True])
def test_vanilla_vit(layout, pre_norm, config_of, randomize, relative_error):
    model = randomize(vanilla('VisionTransformer', arch=VIT, img_size=16, patch_size=8))
    state = dict(model.state_dict())
    torch.nn.init.normal_(model.pos_embed)
    given = {f'backbone.{k}': v for k, v in state.items()}
    if layout != 'mmpretrain':
        given = {}
        for key, value in state.items():
            if key.startswith('ln1'):
                key = key.replace('ln1', 'norm')
            for old, new in (
                ('layers.0.', 'blocks.0.'),
                ('layers.1.', 'blocks.1.'),
                ('ln', 'norm'),
                ('projection', 'proj'),
                ('ffn.blocks.0.0', 'mlp.fc1'),
                ('ffn.layers.0.0', 'mlp.fc1'),
                ('ffn.layers.1', 'mlp.fc2'),
            ):
                key = key.replace(old, new)
            given[key.replace('ffn.blocks.1', 'mlp.fc2')] = value
        assert 'blocks.1.mlp.fc2.weight' in given, given.keys()
    left_out = []
    if layout == 'distilled':
        given['dist_token'] = torch.randn(1, 1, 16)
        given['head_dist.weight'] = torch.randn(5, 16)
        given['pos_embed'] = torch.cat(
            [state['pos_embed'][:, :1], torch.randn(1, 1, 16), state['pos_embed'][:, 1:]], 1
        )
        left_out = ['dist_token', 'head_dist.weight']
    done = to_mm(given, config_of('vit', pre_norm=pre_norm))
    assert (done.form, done.left_out) == ('vanilla', left_out)
    backbone = MODELS.build(dict(done.backbone)).eval()
    own = {k[9:]: v for k, v in done.state_dict.items()}
    backbone.load_state_dict(own, strict=True)
    # The embedding is the same, without the bias too.
    x = torch.randn(2, 3, 16, 16)
    seen = []
    for m in (model, backbone):
        m.pre_norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        with torch.no_grad():
            m(x)
    assert relative_error(seen[1], seen[0]) < 1e-6
    for i in range(2):
        for key in ('attn.qkv.weight', 'attn.proj.bias', 'ln1.weight'):
            assert torch.equal(own[f'layers.{i}.{key}'], state[f'layers.{i}.{key}'])
        for old, new in (
            ('ffn.layers.0.0', 'ffn.fc1'),
            ('ffn.layers.1', 'ffn.fc2'),
            ('ln2', 'ffn.norm1'),
        ):
            for kind in ('weight', 'bias'):
                assert torch.equal(
                    own[f'layers.{i}.{new}.{kind}'], state[f'layers.{i}.{old}.{kind}']
                )
    assert ('pre_norm.weight' in done.fresh) == pre_norm


# What a converted checkpoint is for.


@pytest.fixture
def small_swin(tmp_path):
    """A converted checkpoint, of the backbone of the demo's configs."""
    weights = swin_layout('training', 48, (2, 2, 4, 2), window=5, num_heads=3)
    src, dst = tmp_path / 'authors.pth', tmp_path / 'converted.pth'
    torch.save(dict(model=weights), src)
    repavit_to_mm(str(src), str(dst))
    return str(dst)


@pytest.mark.parametrize('task', ['retinanet', 'mask_rcnn', 'upernet'])
def test_no_missing_or_unexpected_key_in(task, small_swin):
    pytest.importorskip('mmseg' if task == 'upernet' else 'mmdet')
    cfg = load_config(repa_mm.config_path(f'demo/{task}_repa_swin_digits.py'))
    model = MODELS.build(cfg.model.backbone)
    weights = torch.load(small_swin, weights_only=True)['state_dict']
    own = {k[9:]: v for k, v in weights.items() if k.startswith('backbone.')}
    model.load_state_dict(own, strict=True)
    assert torch.equal(model.norm3.weight, own['norm3.weight'])
    # The others are new, and ones and zeros as in a new model.
    assert (model.norm1.weight == 1).all() and (model.norm1.bias == 0).all()


def test_a_detector_is_fine_tuned(small_swin, tmp_path, monkeypatch):
    pytest.importorskip('mmdet')
    pytest.importorskip('sklearn')
    pytest.importorskip('skimage')
    from repa_mm.demo.dataset import write_digit_scenes
    from repa_mm.run import runner_for_training

    write_digit_scenes(str(tmp_path / 'data/demo'), num_train=4, num_val=2, size=96)
    monkeypatch.chdir(tmp_path)
    runner = runner_for_training(
        repa_mm.config_path('demo/retinanet_repa_swin_digits.py'),
        str(tmp_path / 'work'),
        cfg_options={
            'train_dataloader.batch_size': 2,
            'train_cfg.max_epochs': 1,
            'train_cfg.val_interval': 5,
            'default_hooks.logger.interval': 1,
            'model.backbone.norm_eval': True,
            'model.backbone.init_cfg': dict(
                type='Pretrained', checkpoint=small_swin, prefix='backbone.'
            ),
        },
    )
    runner.train()
    (log,) = (tmp_path / 'work').glob('*/*.log')
    text = log.read_text()
    assert 'load backbone. in model from' in text
    for word in ('missing', 'unexpected', 'size mismatch', 'do not match'):
        assert word not in text.split('load backbone. in model from')[1]
    weights = torch.load(small_swin, weights_only=True)['state_dict']
    own = runner.model.backbone.state_dict()
    key = 'stages.2.blocks.3.ffn.{}'
    assert torch.equal(
        own[key.format('norm2.running_var')], weights['backbone.' + key.format('norm2.running_var')]
    )
    change = (
        (own[key.format('fc1.weight')] - weights['backbone.' + key.format('fc1.weight')])
        .abs()
        .max()
    )
    assert 0 < change < 0.1


@pytest.mark.parametrize('split', ['train', 'test'])
def test_calibrating_a_converted_checkpoint(
    split, small_swin, tmp_path, monkeypatch, relative_error
):
    pytest.importorskip('mmdet')
    pytest.importorskip('sklearn')
    pytest.importorskip('skimage')
    from repa_mm.demo.dataset import write_digit_scenes

    write_digit_scenes(str(tmp_path / 'data/demo'), num_train=4, num_val=2, size=96)
    monkeypatch.chdir(tmp_path)
    config = repa_mm.config_path('demo/retinanet_repa_swin_digits.py')
    done = calibrate_checkpoint(
        config,
        small_swin,
        'out.pth',
        split=split,
        num_batches=2,
        cfg_options={f'{split}_dataloader.batch_size': 2},
    )
    assert done == dict(
        ffns=10, batches=2 if split == 'train' else 1, images=4 if split == 'train' else 2
    )
    before, after = (
        torch.load(f, weights_only=True)['state_dict'] for f in (small_swin, 'out.pth')
    )
    assert list(before) == list(after)
    for key in before:
        changed = not torch.equal(before[key], after[key])
        assert changed == (
            '.ffn.norm' in key and key.rpartition('.')[2] not in ('weight', 'bias')
        ), key
    for error, match, args in (
        (ValueError, 'is the input', dict(out=small_swin)),
        (ValueError, 'no val', dict(split='vall')),
        (
            CheckpointError,
            'no weight of a backbone',
            dict(checkpoint=str(tmp_path / 'authors2.pth')),
        ),
    ):
        torch.save(dict(a=torch.ones(1)), tmp_path / 'authors2.pth')
        with pytest.raises(error, match=match):
            calibrate_checkpoint(
                **{**dict(config=config, checkpoint=small_swin, out='new.pth'), **args}
            )
    assert not os.path.exists('new.pth')


@pytest.fixture
def run_tool(tmp_path, monkeypatch, capsys):
    """Runs a tool in a folder of its own; what it prints."""

    def run(tool, *args):
        path = str(ROOT / 'tools' / f'{tool}.py')
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, 'argv', [path, *args])
        capsys.readouterr()
        runpy.run_path(path, run_name='__main__')
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    'tool, args, message',
    [
        (
            'model_converters/repavit_to_mm',
            ['none.pth', 'o.pth'],
            "error: no checkpoint at 'none.pth'",
        ),
        (
            'model_converters/mm_to_repavit',
            ['none.pth', 'o.pth'],
            "error: no checkpoint at 'none.pth'",
        ),
        ('calibrate_bn', ['none.py', 'none.pth', 'o.pth'], "error: no config at 'none.py'"),
    ],
)
def test_tools_say_what_is_wrong(tool, args, message, run_tool):
    with pytest.raises(SystemExit) as info:
        run_tool(tool, *args)
    assert str(info.value).startswith(message)


def test_tools_say_what_they_did(run_tool, tmp_path):
    torch.save(dict(model=swin_layout('training')), tmp_path / 'a.pth')
    text = run_tool('model_converters/repavit_to_mm', 'a.pth', 'b.pth')
    for part in (
        'RePaSwinTransformer',
        "'depths': [2, 1, 2, 1]",
        'training form',
        'idle ratio: 0.75, from assumption',
        '--idle-ratio',
        'head.fc.weight (5, 64)',
        'wrote b.pth',
    ):
        assert part in text, text
    whole = torch.load(tmp_path / 'b.pth', weights_only=True)['state_dict']
    whole['bbox_head.fc.weight'] = torch.ones(1)
    torch.save(dict(state_dict=whole), tmp_path / 'whole.pth')
    with pytest.raises(SystemExit, match='1 weights of bbox_head .*--backbone-only'):
        run_tool('model_converters/mm_to_repavit', 'whole.pth', 'c.pth')
    assert not (tmp_path / 'c.pth').exists()
    text = run_tool('model_converters/mm_to_repavit', 'whole.pth', 'c.pth', '--backbone-only')
    assert "left out: 'bbox_head.fc.weight'" in text
    text = run_tool('model_converters/mm_to_repavit', 'b.pth', 'c.pth')
    assert 'idle ratio: 0.75, from the checkpoint' in text and '--idle-ratio' not in text
    back = torch.load(tmp_path / 'c.pth', weights_only=True)['model']
    for key, value in swin_layout('training').items():
        assert torch.equal(back[key], value)
