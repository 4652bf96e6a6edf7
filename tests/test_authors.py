"""Checkpoints of the code of RePaFormer's and DINO's authors."""

import argparse
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mmengine.registry import MODELS

import repa_mm
from repa_mm.authors import translate
from repa_mm.checkpoints import load_checkpoint, load_weights
from repa_mm.config import load_config
from repa_mm.reparam import CheckpointError, reparameterize

ROOT = Path(repa_mm.__file__).resolve().parents[1]

# Models in the layout of the authors' repositories: a state dict of random numbers, and what their
# code computes with it, written out.


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
    # Some families' see the tokens without the residual scale.
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
    vanilla = form == 'vanilla'
    w.linear('patch_embed.proj', 16, 3, 8, 8, bias=vanilla)
    if not vanilla:
        w.norm('norm_pre', 16)
    for i in range(2):
        w.norm(f'blocks.{i}.norm1' if vanilla else f'blocks.{i}.attn.norm', 16)
        w.linear(f'blocks.{i}.attn.qkv', 48, 16)
        w.linear(f'blocks.{i}.attn.proj', 16, 16)
        w.ffn(f'blocks.{i}.mlp', 16)
    w.norm('norm', 16)
    w.linear('head', 5, 16)
    return w.weights


def vit(w, x):
    x = F.conv2d(x, w['patch_embed.proj.weight'], w.get('patch_embed.proj.bias'), stride=8)
    x = x.flatten(2).transpose(1, 2)
    x = torch.cat([w['cls_token'].expand(len(x), 1, 16), x], 1) + w['pos_embed']
    if 'norm_pre.weight' in w:
        x = norm(w, 'norm_pre', x, 1e-6)
    for i in range(2):
        b = f'blocks.{i}'
        before = f'{b}.norm1' if f'{b}.norm1.weight' in w else f'{b}.attn.norm'
        x = x + attention(w, f'{b}.attn', norm(w, before, x), 4)
        x = ffn(w, f'{b}.mlp', x)
    return linear(w, 'head', norm(w, 'norm', x, 1e-6)[:, 0])


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


# Each family's layout, what it computes, the size of the images, the idle ratio, and its config.
VIT = dict(embed_dims=16, num_layers=2, num_heads=4, feedforward_channels=64)
SMALL = dict(img_size=16, patch_size=8)
SWIN = dict(embed_dims=8, depths=list(SWIN_DEPTHS), num_heads=[1, 2, 4, 8])
POOL = dict(layers=[1, 2, 1, 1], embed_dims=[8, 16, 24, 32], mlp_ratios=[4] * 4)
MIXER = dict(embed_dims=16, num_layers=2, tokens_mlp_dims=8, channels_mlp_dims=64)
FAMILIES = dict(
    swin=(swin_layout, swin, 64, 0.75, 'repa_swin_t_in1k', dict(arch=SWIN, window_size=2)),
    vit=(vit_layout, vit, 16, 0.75, 'repa_deit_t_in1k', dict(arch=VIT, **SMALL)),
    poolformer=(
        *(poolformer_layout, poolformer, 64, 0.75, 'repa_poolformer_s12_in1k'),
        dict(arch=dict(POOL, layer_scale_init_value=1e-5)),
    ),
    mixer=(
        *(mixer_layout, mixer, 32, 0.75, 'repa_mlp_mixer_b16_in1k'),
        dict(arch=MIXER, img_size=32, patch_size=16),
    ),
)


def config_of(family, **kwargs):
    """The config of a small backbone."""
    *_, base, small = FAMILIES[family]
    cfg = load_config(repa_mm.config_path(f'{base}.py')).model.backbone.to_dict()
    return {**cfg, **small, **kwargs}


def run(weights, cfg, x, deploy=False):
    """Logits of translated weights."""
    backbone = MODELS.build(cfg)
    backbone.eval()  # which returns None in mmpretrain
    load_weights(backbone, {k[9:]: v for k, v in weights.items() if k.startswith('backbone.')})
    if deploy:
        reparameterize(backbone, inplace=True)
    with torch.no_grad():
        out = backbone(x)[-1]
    return linear(weights, 'head.fc', out if out.ndim == 2 else out.flatten(2).mean(2))


@pytest.mark.parametrize('form', ['training', 'deploy'])
@pytest.mark.parametrize('family', FAMILIES)
def test_same_logits(family, form, relative_error):
    layout, forward, size, ratio, *_ = FAMILIES[family]
    weights, cfg = layout(form, ratio=ratio), config_of(family)
    before = {k: v.clone() for k, v in weights.items()}
    done = translate(weights, cfg)
    x = torch.randn(2, 3, size, size)
    expected = forward(weights, x)
    for deploy in (False, True):
        assert relative_error(run(done, cfg, x, deploy), expected) < 1e-5
    assert all(torch.equal(weights[key], value) for key, value in before.items())


@pytest.mark.parametrize(
    'family, kind, layout',
    [('vit', 'VisionTransformer', 'dino'), ('swin', 'SwinTransformer', 'original')],
)
def test_ordinary_models(family, kind, layout, relative_error):
    build, forward, size, _, _, small = FAMILIES[family]
    weights = build('vanilla')
    given = weights
    eps = dict(layer_cfgs=dict(norm_cfg=dict(type='LN', eps=1e-5))) if family == 'vit' else {}
    if layout == 'dino':
        given = {k: v for k, v in weights.items() if not k.startswith('head')}
        given = {f'module.backbone.{k}': v for k, v in given.items()}
        given['module.head.mlp.0.weight'] = torch.ones(2, 16)
    cfg = dict(type=f'mmpretrain.{kind}', **small, **eps)
    cfg |= dict(pad_small_map=True) if family == 'swin' else {}
    done = translate(given, cfg)
    if layout == 'dino':
        assert all(k.startswith('backbone.') for k in done)
        done.update({f'head.fc.{k}': weights[f'head.{k}'] for k in ('weight', 'bias')})
    x = torch.randn(2, 3, size, size)
    assert relative_error(run(done, cfg, x), forward(weights, x)) < 1e-5


@pytest.mark.parametrize('ratio', [0.0, 1.0])
def test_extreme_idle_ratios_in_the_deploy_form(ratio, relative_error):
    weights, cfg = vit_layout('deploy', ratio=ratio), config_of('vit', idle_ratio=ratio)
    x = torch.randn(2, 3, 16, 16)
    assert relative_error(run(translate(weights, cfg), cfg, x), vit(weights, x)) < 1e-5


@pytest.mark.parametrize(
    'family, idle_ratio, active',
    [
        ('vit', 0.3, 45),  # of 64: rounded up
        ('poolformer', 0.3, [22, 44, 44, 67, 89]),  # of 32, 64, ...: rounded down
        ('mixer', 0.3, 16),  # always a quarter
    ],
)
def test_idle_ratio_of_the_arguments(family, idle_ratio, active):
    """It is rounded as in the authors' code, and that of the config has to agree."""
    weights = FAMILIES[family][0]('training')
    args = argparse.Namespace(idle_ratio=idle_ratio, heuristic='static')
    with pytest.raises(CheckpointError, match='channels active'):
        translate(weights, config_of(family, idle_ratio=0.5), args)
    hidden = [32, 64, 64, 96, 128] if family == 'poolformer' else [64]
    active = active if isinstance(active, list) else [active]
    ratios = [1 - a / h for a, h in zip(active, hidden)]
    ratios = ratios if family == 'poolformer' else ratios[0]
    done = translate(weights, config_of(family, idle_ratio=ratios), args)
    found = [int(v) for k, v in done.items() if k.endswith('num_active_channels')]
    assert found == active * (1 if family == 'poolformer' else 2)
    # Blocks differ: the config alone says by how much.
    args.heuristic = 'linear'
    translate(weights, config_of(family, idle_ratio=0.5), args)


def without(weights, key):
    return {k: v for k, v in weights.items() if k != key}


@pytest.mark.parametrize(
    'family, weights, message',
    [
        ('vit', dict(a=torch.ones(1)), 'no known architecture'),
        ('vit', without(vit_layout('training'), 'blocks.1.mlp.fc2.weight'), 'layers.1.ffn'),
        ('vit', without(vit_layout('training'), 'norm_pre.bias'), 'lacks pre_norm.bias'),
        ('vit', {**vit_layout('training'), 'gate.weight': torch.ones(1)}, 'has gate'),
        ('vit', vit_layout('deploy', ratio=0.5), 'idle.ratio'),
        ('vit', vit_layout('vanilla'), 'layers.0.ffn'),
        ('swin', vit_layout('training'), 'stages.0'),
    ],
)
def test_what_is_refused(family, weights, message):
    with pytest.raises(CheckpointError, match=f'(?s){message}'):
        translate(weights, config_of(family))


def check_tool(path, names, prefix, option, monkeypatch):
    """Run a tool in the current folder, on a file with weights under two names."""
    given = {f'{prefix}{k}': v for k, v in vit_layout('training').items()}
    other = {k: v + 1 for k, v in given.items()}
    args = argparse.Namespace(idle_ratio=0.75)
    torch.save({names[0]: given, names[1]: other, 'args': args, 'epoch': 3}, 'src.pth')
    config = load_config(repa_mm.config_path('repa_deit_t_in1k.py'))
    config.model.backbone = config_of('vit')
    config.dump('config.py')
    for weights, options in ((given, []), (other, option)):
        monkeypatch.setattr(sys, 'argv', [path, 'config.py', 'src.pth', 'dst.pth', *options])
        runpy.run_path(path, run_name='__main__')
        expected, found = translate(weights, config_of('vit')), load_checkpoint('dst.pth')
        assert found['state_dict'].keys() == expected.keys()
        assert all(torch.equal(found['state_dict'][k], v) for k, v in expected.items())
    torch.save(given, 'src.pth')
    Path('dst.pth').write_text('precious')
    with pytest.raises(CheckpointError, match='src.pth has no weights under'):
        runpy.run_path(path, run_name='__main__')
    assert Path('dst.pth').read_text() == 'precious'


def test_repavit_to_mm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = str(ROOT / 'tools/model_converters/repavit_to_mm.py')
    check_tool(path, ('model', 'model_ema'), '', ['--ema'], monkeypatch)
