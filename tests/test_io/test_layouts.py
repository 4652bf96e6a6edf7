"""Checkpoints of the code of RePaFormer's and DINO's authors."""

import argparse
import runpy
import sys
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from mmengine.config import ConfigDict
from mmengine.registry import MODELS

import repa_mm
from repa_mm.io.checkpoints import load_checkpoint
from repa_mm.io.configs import load_config
from repa_mm.io.layouts import translate
from repa_mm.reparam import CheckpointError

ROOT = Path(repa_mm.__file__).resolve().parents[1]


class Net:
    """Computes what the authors' code does; a weight is drawn where it is first needed.

    The weights lie under the authors' names. Tokens are (..., C), images (N, C, H, W).
    """

    def __init__(self, form, ratio=0.75, expansion=4, tail=()):
        self.form, self.ratio, self.expansion, self.tail = form, ratio, expansion, tail
        self.weights, self.generator = {}, torch.Generator().manual_seed(7)

    def draw(self, name, *shape, low=-0.5, high=0.5):
        if name not in self.weights:
            noise = torch.rand(shape, generator=self.generator)
            self.weights[name] = noise * (high - low) + low
        return self.weights[name]

    def layer(self, name, *shape, bias=True):
        bound = 2 * torch.Size(shape[1:]).numel() ** -0.5
        weight = self.draw(f'{name}.weight', *shape, low=-bound, high=bound)
        return weight, self.draw(f'{name}.bias', shape[0]) if bias else None

    def conv(self, x, name, out, size, bias=True, **kwargs):
        return F.conv2d(x, *self.layer(name, out, x.shape[1], size, size, bias=bias), **kwargs)

    def linear(self, x, name, out, bias=True, tail=()):
        weight, bias = self.layer(name, out, x.shape[-1], *tail, bias=bias)
        return F.linear(x, weight.flatten(1), bias)

    def norm(self, x, name, eps=1e-5, batch=False):
        """LayerNorm, or BatchNorm with its running statistics."""
        c = x.shape[-1]
        scale = self.draw(f'{name}.weight', c, low=0.3, high=1.5)
        shift = self.draw(f'{name}.bias', c)
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        if batch:
            mean = self.draw(f'{name}.running_mean', c, low=-1, high=1)
            var = self.draw(f'{name}.running_var', c, low=0.1, high=3)
            self.weights[f'{name}.num_batches_tracked'] = torch.tensor(9)
        return (x - mean) / (var + eps).sqrt() * scale + shift

    def attention(self, x, name, heads, bias=0.0, qkv_bias=True):
        b, n, c = x.shape
        qkv = self.linear(x, f'{name}.qkv', 3 * c, qkv_bias).view(b, n, 3, heads, c // heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        p = (q @ k.transpose(2, 3) * (c // heads) ** -0.5 + bias).softmax(-1)
        return self.linear((p @ v).transpose(1, 2).reshape(b, n, c), f'{name}.proj', c)

    def ffn(self, x, name, scale=1.0):
        c, tail = x.shape[-1], self.tail
        h = c * self.expansion
        a = round(h * (1 - self.ratio))
        if self.form == 'vanilla':
            u = self.norm(x, f'{name.rpartition(".")[0]}.norm2')
            return x + self.linear(F.gelu(self.linear(u, f'{name}.fc1', h)), f'{name}.fc2', c)
        if self.form == 'training':
            # Some families' see the tokens without the residual scale.
            u = self.norm(x / scale, f'{name}.norm1', batch=True)
            u = self.linear(u, f'{name}.fc1', h, tail=tail)
            u = torch.cat([F.gelu(u[..., :a]), u[..., a:]], -1)
            u = self.linear(self.norm(u, f'{name}.norm2', batch=True), f'{name}.fc2', c, tail=tail)
            return x + scale * u * (self.draw(f'{name}.ls', c) if tail else 1)
        if a == h:
            self.weights[f'{name}.fc1.weight'] = torch.eye(c).view(c, c, *tail)
        y = self.linear(x, f'{name}.fc1', c, tail=tail)
        if a:
            u = F.gelu(self.linear(x, f'{name}.fc2', a, tail=tail))
            y = y + self.linear(u, f'{name}.fc3', c, bias=False, tail=tail)
        return y

    def tokens(self, x):
        """A class token, and position embeddings."""
        x = torch.cat([self.draw('cls_token', 1, 1, 16).expand(len(x), 1, 16), x], 1)
        return x + self.draw('pos_embed', 1, 5, 16)


def vit(net, x):
    vanilla = net.form == 'vanilla'
    x = net.conv(x, 'patch_embed.proj', 16, 8, bias=vanilla, stride=8)
    x = net.tokens(x.flatten(2).transpose(1, 2))
    x = x if vanilla else net.norm(x, 'norm_pre', 1e-6)
    for i in range(2):
        b = f'blocks.{i}'
        u = net.norm(x, f'{b}.norm1' if vanilla else f'{b}.attn.norm')
        x = net.ffn(x + net.attention(u, f'{b}.attn', 4), f'{b}.mlp')
    return net.linear(net.norm(x, 'norm', 1e-6)[:, 0], 'head', 5)


SWIN_DEPTHS = (2, 1, 2, 1)


def swin(net, x):
    """On 64x64 images, windows of 2x2."""
    x = net.conv(x, 'patch_embed.proj', 8, 4, stride=4).permute(0, 2, 3, 1)
    x = net.norm(x, 'patch_embed.norm')
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
            table = net.draw(f'{b}.attn.relative_position_bias_table', 9, 2**i)
            bias = table[index].permute(2, 0, 1).masked_fill(~same, -1e9)
            u = x.flatten(1, 2)
            u = u + net.attention(net.norm(u, f'{b}.norm1'), f'{b}.attn', 2**i, bias)
            x = net.ffn(u, f'{b}.mlp').view(x.shape)
        if i < 3:
            x = torch.cat([x[:, p::2, q::2] for q in (0, 1) for p in (0, 1)], -1)
            d = f'layers.{i}.downsample'
            x = net.linear(net.norm(x, f'{d}.norm'), f'{d}.reduction', 2**i * 16, bias=False)
    return net.linear(net.norm(x, 'norm').mean((1, 2)), 'head', 5)


def poolformer(net, x):
    def group_norm(x, name):
        c = x.shape[1]
        scale = net.draw(f'{name}.weight', c, low=0.3, high=1.5)
        return F.group_norm(x, 1, scale, net.draw(f'{name}.bias', c))

    x = net.conv(x, 'patch_embed.proj', 8, 7, stride=4, padding=2)
    for i, c in enumerate((8, 16, 24, 32)):
        for j in range(2 if i == 1 else 1):
            b = f'network.{2 * i}.{j}'
            u = group_norm(x, f'{b}.norm1')
            mixed = F.avg_pool2d(u, 7, 1, 3, count_include_pad=False) - u
            x = x + net.draw(f'{b}.layer_scale_1', c)[:, None, None] * mixed
            x = net.ffn(x.permute(0, 2, 3, 1), f'{b}.mlp').permute(0, 3, 1, 2)
        if i < 3:
            x = net.conv(x, f'network.{2 * i + 1}.proj', c + 8, 3, stride=2, padding=1)
    return net.linear(group_norm(x, 'norm').mean((2, 3)), 'head', 5)


def mixer(net, x):
    x = net.conv(x, 'stem.proj', 16, 16, stride=16).flatten(2).transpose(1, 2)
    for i in range(2):
        t = f'blocks.{i}.mlp_tokens'
        u = net.norm(x.transpose(1, 2), f'{t}.norm')
        u = net.linear(F.gelu(net.linear(u, f'{t}.fc1', 8)), f'{t}.fc2', 4)
        x = net.ffn(x + u.transpose(1, 2), f'blocks.{i}.mlp_channels')
    return net.linear(net.norm(x, 'norm', 1e-6).mean(1), 'head', 5)


# What each family computes, the size of the images, and its config.
VIT = dict(embed_dims=16, num_layers=2, num_heads=4, feedforward_channels=64)
SMALL = dict(img_size=16, patch_size=8)
SWIN = dict(embed_dims=8, depths=list(SWIN_DEPTHS), num_heads=[1, 2, 4, 8])
POOL = dict(layers=[1, 2, 1, 1], embed_dims=[8, 16, 24, 32], mlp_ratios=[4] * 4)
POOL['layer_scale_init_value'] = 1e-5
MIXER = dict(embed_dims=16, num_layers=2, tokens_mlp_dims=8, channels_mlp_dims=64)
FAMILIES = dict(
    swin=(swin, 64, 'repa_swin_t_in1k', dict(arch=SWIN, window_size=2)),
    vit=(vit, 16, 'repa_deit_t_in1k', dict(arch=VIT, **SMALL)),
    poolformer=(poolformer, 64, 'repa_poolformer_s12_in1k', dict(arch=POOL)),
    mixer=(mixer, 32, 'repa_mlp_mixer_b16_in1k', dict(arch=MIXER, img_size=32, patch_size=16)),
)


def made(family, form, ratio=0.75):
    """Weights in the authors' layout, images, and the logits of the authors' code."""
    net = Net(form, ratio, tail=(1, 1) if family == 'poolformer' else ())
    forward, size, *_ = FAMILIES[family]
    x = torch.randn(2, 3, size, size)
    return net.weights, x, forward(net, x)


def config_of(family, **kwargs):
    """The config of a small backbone."""
    *_, base, small = FAMILIES[family]
    cfg = load_config(repa_mm.config_path(f'{base}.py')).model.backbone.to_dict()
    return {**cfg, **small, **kwargs}


def logits(cfg, path, weights, x, prefix='backbone.'):
    """Logits of a backbone that loads the file by its `init_cfg`, with the head of the weights."""
    init_cfg = dict(type='Pretrained', checkpoint=str(path), prefix=prefix)
    backbone = MODELS.build(dict(cfg, init_cfg=init_cfg))
    backbone.init_weights()
    backbone.eval()
    head = {key.removeprefix('head.fc.').removeprefix('head.'): v for key, v in weights.items()}
    with torch.no_grad():
        out = backbone(x)[-1]
    return F.linear(out.flatten(2).mean(2) if out.ndim > 2 else out, head['weight'], head['bias'])


@pytest.mark.parametrize('form', ['training', 'deploy'])
@pytest.mark.parametrize('family', FAMILIES)
def test_a_backbone_loads_the_file_and_its_translation(family, form, tmp_path, relative_error):
    weights, x, expected = made(family, form)
    more, path = dict(args=argparse.Namespace(idle_ratio=0.75), epoch=3), tmp_path / 'model.pth'
    # Another map's norm is left as it is.
    cfg = config_of(family, **dict(out_indices=[2, 3]) if family == 'swin' else {})
    translated = translate(weights, cfg)
    cfg.update(deploy=form == 'deploy')
    files = dict(more, model=weights), dict(more, state_dict=weights), dict(state_dict=translated)
    for content in files:
        torch.save(content, path)
        assert relative_error(logits(cfg, path, weights, x), expected) < 1e-5
        with pytest.raises(CheckpointError):
            logits(dict(cfg, idle_ratio=0.5), path, weights, x)


# A RePaFormer that computes what the ordinary weights that fill it do.
SAME = dict(idle_ratio=0.0, ffn_norm_cfg=dict(type='keep'))


@pytest.mark.parametrize('wrapped', [False, True])
@pytest.mark.parametrize('family', ['vit', 'swin'])
def test_ordinary_weights_of_other_layouts_fill(family, wrapped, tmp_path, relative_error):
    """The official layout of Swin, and DINO's."""
    weights, x, expected = made(family, 'vanilla')
    given = {f'module.backbone.{k}': v for k, v in weights.items()} if wrapped else weights
    torch.save(dict(model=given), tmp_path / 'model.pth')
    eps = dict(layer_cfgs=dict(norm_cfg=dict(type='LN', eps=1e-5))) if family == 'vit' else {}
    cfg = config_of(family, **SAME, **eps)
    if family == 'vit':
        cfg.update(pre_norm=False)
    assert relative_error(logits(cfg, tmp_path / 'model.pth', weights, x), expected) < 1e-5
    del given[next(key for key in given if 'norm1' in key)]
    torch.save(given, tmp_path / 'model.pth')
    with pytest.raises(CheckpointError, match='lacks'):
        logits(cfg, tmp_path / 'model.pth', weights, x)


@pytest.mark.parametrize('order', [1, -1])
def test_the_prefix_chooses_one_of_several_backbones(order, tmp_path, relative_error):
    """A student and its teacher, whose weights have the same names behind the prefix."""
    weights, x, expected = made('swin', 'vanilla')
    both = [
        {f'student_backbone.{k}': v for k, v in weights.items()},
        {f'teacher_backbone.{k}': 0 * v for k, v in weights.items()},
    ][::order]
    torch.save(dict(state_dict={**both[0], **both[1]}), tmp_path / 'model.pth')
    args = config_of('swin', **SAME), tmp_path / 'model.pth', weights, x
    assert relative_error(logits(*args, 'student_backbone.'), expected) < 1e-5
    with pytest.raises(CheckpointError, match='student_backbone., teacher_backbone.: choose'):
        logits(*args, 'backbone.')


def others(family):
    """A model of timm, or a PoolFormer with its official names, and the config of a RePaFormer."""
    if family == 'poolformer':
        model = MODELS.build(dict(type='mmpretrain.PoolFormer', arch=POOL))
        return model, 64, dict(type='RePaPoolFormer', arch=POOL)
    small = dict(patch_size=4, num_classes=5, embed_dim=16)
    if family == 'swin':
        arch = dict(depths=SWIN_DEPTHS, num_heads=(1, 2, 4, 8), window_size=2)
        cfg = dict(type='RePaSwinTransformer', arch=dict(SWIN, embed_dims=16), window_size=2)
        return timm.models.SwinTransformer(img_size=64, **small, **arch), 64, cfg
    model = timm.models.VisionTransformer(img_size=16, depth=2, num_heads=4, **small)
    cfg = dict(type='RePaVisionTransformer', arch=VIT, img_size=16, patch_size=4)
    return model, 16, dict(cfg, layer_cfgs=dict(norm_cfg=dict(type='LN', eps=1e-6)))


@pytest.mark.parametrize('family', ['swin', 'vit', 'poolformer'])
def test_weights_of_timm_and_of_poolformer_fill(family, tmp_path, randomize, relative_error):
    model, size, cfg = others(family)
    randomize(model).eval()
    weights = {k.replace('norm6.', 'norm.'): v for k, v in model.state_dict().items()}
    torch.save(weights, tmp_path / 'model.pth')
    x = torch.randn(2, 3, size, size)
    head = {k: v for k, v in weights.items() if k.startswith('head')}
    with torch.no_grad():
        expected = model(x)
    if family == 'poolformer':
        head = dict(weight=torch.eye(32), bias=torch.zeros(32))
        expected = expected[-1].mean((2, 3))
    found = logits(dict(cfg, **SAME), tmp_path / 'model.pth', head, x)
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize('layout', ['timm', 'DINOv2'])
@pytest.mark.parametrize('cfg', [dict(type='Restructured'), SAME])
def test_a_vit_with_layer_scale(layout, cfg, tmp_path, randomize, relative_error):
    """DINOv2's own files have the names of timm, a mask token and perhaps registers."""
    options = dict(img_size=16, patch_size=4, num_classes=0, embed_dim=16, depth=2, num_heads=4)
    model = timm.models.VisionTransformer(**options, init_values=1e-5)
    randomize(model).eval()
    vit = dict(type='mmpretrain.VisionTransformer', arch=VIT, img_size=16, patch_size=4)
    vit.update(layer_scale_init_value=1e-5, out_type='raw')
    path = str(tmp_path / 'model.pth')
    init_cfg = dict(type='Pretrained', checkpoint=path)
    if cfg is SAME:
        cfg = dict(vit, type='RePaVisionTransformer', init_cfg=init_cfg, **SAME)
    else:
        cfg = dict(cfg, model=dict(vit, init_cfg=init_cfg), structures=[])
    weights, x = model.state_dict(), torch.randn(2, 3, 16, 16)
    if layout == 'DINOv2':
        weights['mask_token'] = torch.zeros(1, 16)
    torch.save(weights, path)
    backbone = MODELS.build(cfg)
    backbone.init_weights()
    backbone.eval()
    with torch.no_grad():
        assert relative_error(backbone(x)[0], model.forward_features(x)) < 1e-6
    name = dict(timm='reg_token', DINOv2='register_tokens')[layout]
    torch.save({**weights, name: torch.zeros(1, 4, 16)}, path)
    with pytest.raises(CheckpointError, match=rf'registers \({name}\)'):
        MODELS.build(cfg).init_weights()


def test_a_missing_file_of_a_repaformer():
    cfg = load_config(repa_mm.config_path('retinanet_repa_swin_b.py')).model.backbone
    cfg.init_cfg.checkpoint = 'not/there.pth'
    said = r'(?s)not/there.pth.*RePaSwinTransformer base.*huggingface.co/Ackesnal/RePaViT'
    said += r'.*tools/convert_pretrained.py .* --idle-ratio 0.75'
    with pytest.raises(FileNotFoundError, match=said):
        MODELS.build(cfg).init_weights()


@pytest.mark.parametrize('ratio', [0.0, 1.0])
def test_extreme_idle_ratios_in_the_deploy_form(ratio, tmp_path, relative_error):
    weights, x, expected = made('vit', 'deploy', ratio)
    torch.save(weights, tmp_path / 'model.pth')
    cfg = config_of('vit', idle_ratio=ratio, deploy=True)
    assert relative_error(logits(cfg, tmp_path / 'model.pth', weights, x), expected) < 1e-5


@pytest.mark.parametrize(
    'family, active, hidden',
    [
        ('vit', [45] * 2, [64] * 2),  # rounded up
        ('poolformer', [22, 44, 44, 67, 89], [32, 64, 64, 96, 128]),  # rounded down
        ('mixer', [16] * 2, [64] * 2),  # always a quarter
    ],
)
@pytest.mark.parametrize('kind', [argparse.Namespace, dict])
def test_idle_ratio_of_the_arguments(family, active, hidden, kind):
    """It is rounded as in the authors' code, and that of the config has to agree."""
    weights = made(family, 'training')[0]
    args = kind(idle_ratio=0.3, heuristic='static')
    with pytest.raises(CheckpointError, match='channels active'):
        translate(weights, config_of(family, idle_ratio=0.5), args)
    ratios = [1 - a / h for a, h in zip(active, hidden)]
    done = translate(weights, config_of(family, idle_ratio=ratios), args)
    assert [int(v) for k, v in done.items() if k.endswith('num_active_channels')] == active
    # Blocks differ: the config alone says by how much.
    args = kind(idle_ratio=0.3, heuristic='linear')
    translate(weights, config_of(family, idle_ratio=0.5), args)


@pytest.mark.parametrize(
    'family, form, kwargs, change, message',
    [
        ('vit', 'training', {}, {'blocks.1.mlp.fc2.weight': None}, 'layers.1.ffn'),
        ('vit', 'training', {}, {'gate.weight': torch.ones(1)}, 'has gate'),
        ('vit', 'deploy', dict(idle_ratio=0.5), {}, 'idle.ratio'),
        ('vit', 'training', {}, {'pos_embed': None}, 'lacks pos_embed'),
        ('vit', 'training', dict(pre_norm=False), {}, 'lacks patch_embed.pr.* has pre_norm.w'),
        ('vit', 'training', {}, {'norm.bias': None}, 'lacks ln1.bias'),
        ('swin', 'training', {}, {'patch_embed.norm.bias': None}, 'lacks patch_embed.norm.bias'),
        ('swin', 'training', {}, {'norm.weight': None, 'norm.bias': None}, 'lacks norm3.weight, n'),
        ('poolformer', 'training', {}, {'patch_embed.proj.bias': None}, 'lacks patch_embed.proj'),
        ('mixer', 'training', {}, {'stem.proj.bias': None}, 'lacks patch_embed.projection.bias'),
    ],
)
def test_what_is_refused(family, form, kwargs, change, message, tmp_path):
    weights, x, _ = made(family, form)
    weights = {k: v for k, v in {**weights, **change}.items() if v is not None}
    torch.save(dict(model=weights), tmp_path / 'model.pth')
    cfg = config_of(family, **kwargs)
    with pytest.raises(CheckpointError, match=f'(?s){message}'):
        translate(weights, cfg)
    with pytest.raises(CheckpointError, match=f'(?s){message}'):
        logits(dict(cfg, deploy=form == 'deploy'), tmp_path / 'model.pth', weights, x)


@pytest.mark.parametrize(
    'weights, message',
    [
        (dict(a=torch.ones(1)), 'layers.0.ffn'),
        (made('vit', 'vanilla')[0], 'layers.0.ffn'),
        (made('swin', 'training')[0], 'layers.0.'),
    ],
)
def test_weights_of_other_models_are_refused(weights, message):
    with pytest.raises(CheckpointError, match=f'(?s){message}'):
        translate(weights, config_of('vit'))


def test_a_model_without_a_class_token_or_of_fewer_stages():
    weights, *_ = made('vit', 'training')
    cfg = config_of('vit', with_cls_token=False, out_type='featmap', final_norm=False)
    found = translate(weights, cfg)
    assert torch.equal(found['backbone.pos_embed'], weights['pos_embed'][:, 1:])
    assert not {'backbone.cls_token', 'backbone.ln1.weight'} & found.keys()
    weights, *_ = made('swin', 'training')
    weights = {k: v for k, v in weights.items() if not k.startswith(('layers.3', 'layers.2.downs'))}
    weights.update({name: torch.rand(32) for name in ('norm.weight', 'norm.bias')})
    arch = dict(SWIN, depths=SWIN['depths'][:3], num_heads=SWIN['num_heads'][:3])
    found = translate(weights, config_of('swin', arch=arch, out_indices=[1, 2]))
    assert torch.equal(found['backbone.norm2.weight'], weights['norm.weight'])


def test_bias_tables_of_other_windows_are_resized_as_by_the_codebase(tmp_path):
    path = str(tmp_path / 'model.pth')
    torch.save(dict(model=made('swin', 'vanilla')[0]), path)
    cfg = dict(SWIN, type='mmdet.SwinTransformer', window_size=3, out_indices=(3,))
    cfg.update(convert_weights=True, init_cfg=ConfigDict(type='Pretrained', checkpoint=path))
    idle = dict(type='Restructured', model=cfg, structures=[dict(type='ChannelIdle')])
    models = [MODELS.build(each) for each in (cfg, idle)]
    for model in models:
        model.init_weights()
    stock, ours = (model.state_dict() for model in models)
    tables = [key for key in stock if key.endswith('bias_table')]
    assert tables and all(torch.equal(stock[key], ours[key]) for key in tables)


def check_tool(path, names, prefix, option, monkeypatch):
    """Run a tool in the current folder, on a file with weights under two names."""
    given = {f'{prefix}{k}': v for k, v in made('vit', 'training')[0].items()}
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
    with pytest.raises((CheckpointError, SystemExit), match='src.pth has no weights under'):
        runpy.run_path(path, run_name='__main__')
    assert Path('dst.pth').read_text() == 'precious'


def test_repavit_to_mm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = str(ROOT / 'tools/model_converters/repavit_to_mm.py')
    check_tool(path, ('model', 'model_ema'), '', ['--ema'], monkeypatch)
