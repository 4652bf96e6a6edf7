"""Channel-idle FFNs in every family of blocks, and families that cannot have them."""

import copy
import importlib
import re
from pathlib import Path

import pytest
import torch
import torch.nn as nn

import repa_mm
from repa_mm.apis.features import tensors
from repa_mm.faster import rewrite_
from repa_mm.models import Structure, add_structures_
from repa_mm.models.sites import attention_sites, ffn_sites
from repa_mm.models.structures import idle_ffn
from repa_mm.reparam import ChannelIdleFFN, MergedFFN, TrainingForm
from tests.toy import Adapter


def idle(model, idle_ratio=0.75, norm_cfg=dict(type='BN'), where=None):
    """Channel-idle FFNs in a model, in place."""
    structure = dict(type='ChannelIdle', idle_ratio=idle_ratio, norm_cfg=norm_cfg, where=where)
    return add_structures_(model, [structure])


VIT = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=64)
TIMM = dict(embed_dim=16, depth=2, num_heads=2)
TIMM_VIT = dict(model_name='vit_tiny_patch16_224', **TIMM)
TIMM_DINO = dict(model_name='vit_small_patch14_dinov2', init_values=0.3, patch_size=16, **TIMM)
TIMM_DINO3 = dict(model_name='vit_small_patch16_dinov3', init_values=0.3, **TIMM)
STAGES = dict(embed_dims=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2])
LAYERS = dict(embed_dims=8, num_layers=[1, 1, 1, 1], num_heads=[1, 1, 2, 2])
SAM = dict(arch=dict(VIT, global_attn_indexes=[1]), window_size=3, out_channels=8, use_rel_pos=True)
T2T = dict(token_dims=8, use_performer=False), dict(num_heads=2, feedforward_channels=32)
T2T = dict(t2t_cfg=T2T[0], num_layers=2, embed_dims=16, layer_cfgs=T2T[1])
TNT = dict(embed_dims_outer=16, embed_dims_inner=8, num_heads_outer=2, num_heads_inner=2)
MIXER = dict(embed_dims=16, num_layers=2, tokens_mlp_dims=8, channels_mlp_dims=64)
POOL = dict(arch=dict(layers=[1, 1, 1, 1], embed_dims=[4, 8, 12, 16]), frozen_stages=-1)
SWIN_V2 = dict(arch=dict(STAGES, extra_norm_every_n_blocks=0), window_size=2)
CONVNEXT = dict(arch=dict(depths=[1, 1, 1, 1], channels=[4, 8, 12, 16]))
MMSEG_VIT = dict(img_size=64, embed_dims=16, num_layers=2, num_heads=2)
MMSEG_TIMM = dict(TIMM_VIT, pretrained=False, img_size=64, out_indices=(0, 1))

# Package, class, arguments, and the number of FFNs that become channel-idle.
# docs/models.md lists them.
CONVERTIBLE = {
    'ViT': ('mmpretrain', 'VisionTransformer', dict(arch=VIT), 2),
    'DINOv2': ('mmpretrain', 'VisionTransformer', dict(arch=VIT, layer_scale_init_value=0.3), 2),
    'DeiT distilled': ('mmpretrain', 'DistilledVisionTransformer', dict(arch=VIT), 2),
    'DeiT III': ('mmpretrain', 'DeiT3', dict(arch=VIT), 2),
    'BEiT': ('mmpretrain', 'BEiTViT', dict(arch=VIT), 2),
    'BEiT without scale': ('mmpretrain', 'BEiTViT', dict(arch=VIT, layer_scale_init_value=0.0), 2),
    'MAE': ('mmpretrain', 'MAEViT', dict(arch=VIT), 2),
    'MoCo v3': ('mmpretrain', 'MoCoV3ViT', dict(arch=VIT, patch_size=16), 2),
    'SAM': ('mmpretrain', 'ViTSAM', SAM, 2),
    'Swin': ('mmpretrain', 'SwinTransformer', dict(arch=STAGES, pad_small_map=True), 4),
    'T2T-ViT': ('mmpretrain', 'T2T_ViT', T2T, 4),
    'TNT': ('mmpretrain', 'TNT', dict(arch=dict(TNT, num_layers=2)), 4),
    'MixMIM': ('mmpretrain', 'MixMIMTransformer', dict(arch=STAGES, window_size=[2] * 4), 4),
    'DaViT': ('mmpretrain', 'DaViT', dict(arch=STAGES, pad_small_map=True), 8),
    'MLP-Mixer': ('mmpretrain', 'MlpMixer', dict(arch=MIXER), 2),
    'PoolFormer': ('mmpretrain', 'PoolFormer', POOL, 4),
    'Swin V2': ('mmpretrain', 'SwinTransformerV2', SWIN_V2, 4),
    'ConvNeXt': ('mmpretrain', 'ConvNeXt', CONVNEXT, 4),
    'timm ViT': ('mmpretrain', 'TIMMBackbone', TIMM_VIT, 2),
    'timm DINOv2': ('mmpretrain', 'TIMMBackbone', TIMM_DINO, 2),
    'timm DINOv3': ('mmpretrain', 'TIMMBackbone', TIMM_DINO3, 2),
    'MMDetection Swin': ('mmdet', 'SwinTransformer', STAGES, 4),
    'MMSegmentation ViT': ('mmseg', 'VisionTransformer', MMSEG_VIT, 2),
    'MMSegmentation Swin': ('mmseg', 'SwinTransformer', STAGES, 4),
    'MMSegmentation timm': ('mmseg', 'TIMMBackbone', MMSEG_TIMM, 2),
}
# FFNs that are narrowed, and in which idle channels would not merge.
NARROWED = {
    'SegFormer': ('mmseg', 'MixVisionTransformer', dict(LAYERS, sr_ratios=[4, 2, 2, 1]), 4),
    'PVT v2': ('mmdet', 'PyramidVisionTransformerV2', LAYERS, 4),
}

GRN = dict(CONVNEXT, use_grn=True, layer_scale_init_value=0.0)
SWIGLU = dict(arch=VIT, layer_cfgs=dict(ffn_type='swiglu_fused'))
THREE = dict(arch=VIT, layer_cfgs=dict(num_fcs=3))
TIMM_SWIGLU = dict(TIMM, model_name='vit_small_plus_patch16_dinov3')
TIMM_NORM = dict(TIMM_VIT, scale_mlp_norm=True)
MMSEG_BEIT = dict(MMSEG_VIT, img_size=(64, 64))
# What the error says: the name of the FFN in its block, the block, and why.
REFUSED = {
    'ConvNeXt V2': ('mmpretrain', 'ConvNeXt', GRN, "pointwise_conv1', in a ConvNeXtBlock.*GRN"),
    'SwiGLU': ('mmpretrain', 'VisionTransformer', SWIGLU, "layers.0.ffn'.*SwiGLUFFNFused"),
    'EVA-02': ('mmpretrain', 'ViTEVA02', dict(arch=VIT), 'no site'),
    'RevViT': ('mmpretrain', 'RevVisionTransformer', dict(arch=VIT), 'no site'),
    'three layers': ('mmpretrain', 'VisionTransformer', THREE, '3 linear layers, not two'),
    'PVT': ('mmdet', 'PyramidVisionTransformer', LAYERS, "1.ffn'.*around a depthwise"),
    'timm SwiGLU': ('mmpretrain', 'TIMMBackbone', TIMM_SWIGLU, 'in a EvaBlock.*(GluMlp|SwiGLU)'),
    'timm norm': ('mmpretrain', 'TIMMBackbone', TIMM_NORM, 'Mlp has a LayerNorm, too'),
    'MMSegmentation BEiT': ('mmseg', 'BEiT', MMSEG_BEIT, 'in a BEiTTransformerEn.*shortcut'),
    **{case: (*row[:3], 'MixFFN has a depthwise convolution') for case, row in NARROWED.items()},
}


def build(package, name, kwargs):
    of_any_size = 'PoolFormer', 'SwinTransformer', 'DaViT', 'ConvNeXt'
    if package == 'mmpretrain' and name not in of_any_size:
        kwargs = dict(img_size=64, **kwargs)
    module = importlib.import_module(
        f'{package}.models' if package == 'mmpretrain' else f'{package}.models.backbones'
    )
    cls = getattr(module, name, None) or module.MODELS.get(name)
    return cls(**copy.deepcopy(kwargs))


def outputs(model, x):
    masked = type(model).__name__ in ('MAEViT', 'BEiTPretrainViT')
    return tensors(model(x, mask=None) if masked else model(x))


@pytest.mark.parametrize('case', CONVERTIBLE)
def test_convert_train_merge_compare(case, randomize, relative_error):
    package, name, kwargs, number = CONVERTIBLE[case]
    model = build(package, name, kwargs)
    linears = {
        m.weight.flatten(1).sum().item()
        for m in model.modules()
        if isinstance(m, (nn.Linear, nn.Conv2d))
    }
    assert idle(model, 0.5) is model
    ffns = [m for m in model.modules() if isinstance(m, ChannelIdleFFN)]
    assert len(ffns) == number
    for ffn in ffns:  # the linear layers kept their weights
        assert {ffn.fc1.weight.sum().item(), ffn.fc2.weight.sum().item()} <= linears
    x = torch.randn(2, 3, 64, 64)
    model.train()
    sum(y.square().mean() for y in outputs(model, x)).backward()
    for block in {site.block for site in ffn_sites(model)}:  # nothing is left over in it
        for key, param in block.named_parameters():
            assert param.grad is not None and param.grad.isfinite().all(), key

    randomize(model).eval()
    with torch.no_grad():
        expected = outputs(model, x)
        deployed = repa_mm.reparameterize(model)
        assert sum(isinstance(m, MergedFFN) for m in deployed.modules()) == number
        for a, b in zip(outputs(deployed, x), expected):
            assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize('case', CONVERTIBLE)
def test_without_idle_channels_and_with_its_norm_a_model_is_the_same(case, randomize):
    package, name, kwargs, number = CONVERTIBLE[case]
    model = randomize(build(package, name, kwargs)).double()
    model.eval()  # which returns None
    for key, value in model.named_parameters():  # layer scales that count
        if re.search(r'gamma\w*(\.weight)?$|layer_scale_.$', key):
            value.data.uniform_(0.5, 1.5)
    x = torch.randn(2, 3, 64, 64).double()
    with torch.no_grad():
        expected = outputs(model, x)
        kept = idle(copy.deepcopy(model), 0, norm_cfg=dict(type='keep'))
        assert sum(isinstance(m, ChannelIdleFFN) for m in kept.modules()) == number
        named = dict(type='TokenGN' if case == 'PoolFormer' else 'LN')
        named = idle(copy.deepcopy(model), 0, norm_cfg=named)
        for other in (kept, repa_mm.reparameterize(kept), named):
            for actual, y in zip(outputs(other, x), expected):
                assert torch.allclose(actual, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('case', ['ViT', 'PoolFormer'])
def test_what_of_a_norm_stays(case, randomize):
    """Its scale and shift, and its epsilon unless another is given."""
    model = randomize(build(*CONVERTIBLE[case][:3]))
    norms = [site.parts().norm for site in ffn_sites(model)]
    for norm_cfg in (dict(type='BN'), dict(type='LN', eps=0.1), dict(type='TokenGN', eps=0.1)):
        converted = idle(copy.deepcopy(model), norm_cfg=norm_cfg)
        ffns = [m for m in converted.modules() if isinstance(m, ChannelIdleFFN)]
        for ffn, norm in zip(ffns, norms, strict=True):
            assert torch.equal(ffn.norm1.weight, norm.weight)
            assert torch.equal(ffn.norm1.bias, norm.bias)
            assert ffn.norm1.eps == norm_cfg.get('eps', 1e-5)
    block = next(iter(ffn_sites(model))).block
    setattr(block, 'ln2' if case == 'ViT' else 'norm2', type('RMSNorm', (nn.Module,), {})())
    with pytest.raises(ValueError, match='its norm is a RMSNorm'):
        idle(model, norm_cfg=dict(type='keep'))


@pytest.mark.parametrize('case', REFUSED)
def test_what_cannot_be_converted_is_named(case):
    package, name, kwargs, message = REFUSED[case]
    model = build(package, name, kwargs)
    before = {n: type(m) for n, m in model.named_modules()}
    with pytest.raises(ValueError, match=message):
        idle(model)
    # And nothing has changed.
    assert {n: type(m) for n, m in model.named_modules()} == before


def table():
    """Rows of docs/models.md: the package, the classes in it, and three times yes or no."""
    text = (Path(__file__).parents[2] / 'docs' / 'models.md').read_text()
    rows = text.split('<!-- backbones -->')[1].split('\n\n')[0].splitlines()[3:]
    for row in rows:
        package, backbones, *said = (cell.strip() for cell in row[1:-1].split('|'))
        for name in re.findall(r'`(\w+)`', backbones):
            yield package.partition(',')[0].lower().replace('segmentation', 'seg'), name, said


@pytest.mark.parametrize('case', [*CONVERTIBLE, *NARROWED])
def test_what_the_docs_say_of_each_backbone(case):
    package, name, kwargs, _ = {**CONVERTIBLE, **NARROWED}[case]
    model = build(package, name, kwargs)
    (site, *_), heads = ffn_sites(model), attention_sites(model)
    if name == 'TIMMBackbone':
        package, name = 'timm', type(site.block).__name__
    found = []
    for attempt in (lambda: idle_ffn(site), site.modules, lambda: heads[0].parts()):
        try:
            attempt()
            found.append('yes')
        except (ValueError, IndexError):
            found.append('no')
    assert (package, name, found) in [
        (row[0].replace('detection', 'det'), *row[1:]) for row in table()
    ]


def test_every_backbone_of_the_docs_is_tested():
    cases = [*CONVERTIBLE.values(), *NARROWED.values()]
    assert {name for _, name, _ in table()} - {'Block', 'EvaBlock'} == {
        name for _, name, *_ in cases
    } - {'TIMMBackbone'}


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)
        self.drop1, self.drop2 = nn.Dropout(0.0), nn.Dropout(0.0)


class Block(nn.Module):
    """Modules under the names of ViTDet's block."""

    def __init__(self):
        super().__init__()
        self.norm2, self.mlp = nn.LayerNorm(8), Mlp()


def test_blocks_of_vitdet(monkeypatch):
    """They are known by their full name, other classes of that name are not."""
    model = nn.Sequential(Block(), Block())
    assert not ffn_sites(model)
    monkeypatch.setattr(Block, '__module__', 'projects.ViTDet.vitdet.vit')
    assert len(ffn_sites(model)) == 2 and not attention_sites(model)
    with pytest.raises(ValueError, match='LinearPlus adds the shortcut, and a Block'):
        add_structures_(model, [_Plus()])
    model[1].mlp.drop2.p = 0.5
    with pytest.raises(ValueError, match=r"'1.mlp'.* rates, 0.0 for the hidden.* 0.5 for the out"):
        idle(model)
    model[1].mlp.drop1.p = 0.5
    assert [block.mlp.drop.p for block in idle(model)] == [0, 0.5]


class LinearPlus(TrainingForm):
    """A form that adds its input."""


class _Plus(Structure):
    def form(self, site):
        return LinearPlus()


@pytest.mark.parametrize(
    'change, message',
    [
        (lambda ffn: setattr(ffn.layers, '1', Adapter(64, 16)), 'a Adapter, has a forward'),
        (lambda ffn: ffn.layers[0][0].register_forward_hook(print), 'of its own or hooks'),
        (lambda ffn: setattr(ffn, 'dropout_layer', nn.Dropout(0.5)), 'ends with a Dropout'),
        (lambda ffn: setattr(ffn, 'add_identity', False), 'the shortcut is not where'),
    ],
)
def test_an_ffn_that_computes_something_else_is_refused(change, message):
    """And the blocks before it are as they were."""
    model = build('mmpretrain', 'VisionTransformer', dict(arch=VIT))
    change(model.layers[1].ffn)
    widths = dict(type='Widths', widths=8)
    for structure, named in ((dict(type='ChannelIdle'), "'layers.1.ffn'.*"), (widths, '')):
        with pytest.raises(ValueError, match=f'{named}{message}'):
            add_structures_(model, [structure])
        assert model.layers[0].ffn.layers[1].in_features == 64


@pytest.mark.parametrize(
    'case, path',
    [
        ('Swin', 'w_msa.softmax'),
        ('MMDetection Swin', 'w_msa.attn_drop'),
        ('timm ViT', 'attn_drop'),
        ('MMSegmentation ViT', 'attn'),
    ],
)
@pytest.mark.parametrize('fast', [False, True])
def test_parts_of_an_attention_that_narrower_heads_do_not_call(case, path, fast):
    model = build(*CONVERTIBLE[case][:3])
    if fast:
        rewrite_(model, 'train')
    site = attention_sites(model)[0]
    assert site.parts()
    part = site.attention.get_submodule(path)
    part.register_forward_hook(lambda module, args, y: 2 * y)
    with pytest.raises(ValueError, match='heads are known|own or hooks'):
        site.parts()


# What of an ordinary FFN is frozen, and what of its channel-idle FFN is frozen then.
FC1, FC2 = {'fc1.weight', 'fc1.bias'}, {'fc2.weight', 'fc2.bias'}
FROZEN = [
    (FC1, FC1),
    ({'fc2.weight'}, {'fc2.weight'}),
    ({'fc1.bias', 'norm.weight', 'scale'}, {'fc1.bias', 'norm1.weight', 'layer_scale'}),
    # The norm inside of the FFN is new, and its scale is one of the linear layers'.
    (FC1 | FC2, FC1 | FC2 | {'norm2.weight', 'norm2.bias'}),
    (FC1 | FC2 | {'norm.weight', 'norm.bias', 'scale'}, None),
]


@pytest.mark.parametrize('frozen, expected', FROZEN)
@pytest.mark.parametrize('case', ['DINOv2', 'BEiT', 'PoolFormer'])
def test_what_is_frozen_stays_frozen(case, frozen, expected):
    package, name, kwargs, _ = CONVERTIBLE[case]
    model = build(package, name, kwargs)
    parts = [site.parts() for site in ffn_sites(model)]
    for key in frozen:
        attribute, _, child = key.partition('.')
        part = getattr(parts[0], attribute)
        (getattr(part, child) if child else part).requires_grad_(False)
    first, *others = [m for m in idle(model).modules() if isinstance(m, ChannelIdleFFN)]
    names = {key for key, p in first.named_parameters() if not p.requires_grad}
    assert names == ({key for key, _ in first.named_parameters()} if expected is None else expected)
    assert all(p.requires_grad for ffn in others for p in ffn.parameters())
    model.train()  # which returns None
    sum(y.square().mean() for y in outputs(model, torch.rand(2, 3, 64, 64))).backward()
    assert {key for key, p in first.named_parameters() if p.grad is None} == names


def test_weights_of_another_width_train_as_those_before():
    model = build('mmpretrain', 'VisionTransformer', dict(arch=VIT))
    site = ffn_sites(model)[0]
    parts = site.parts()
    parts.fc1.weight.requires_grad_(False)
    parts.fc2.bias.requires_grad_(False)
    site.set_weights(torch.ones(8, 16), torch.ones(8), torch.ones(16, 8), torch.ones(16))
    parameters = *site.parts().fc1.parameters(), *site.parts().fc2.parameters()
    assert [p.requires_grad for p in parameters] == [False, True, True, False]


def test_layer_scale_drop_path_activation_dtype_are_kept():
    rates = dict(layer_scale_init_value=0.3, drop_path_rate=0.2, drop_rate=0.1)
    kwargs = dict(arch=VIT, layer_cfgs=dict(act_cfg=dict(type='ReLU')), **rates)
    model = build('mmpretrain', 'VisionTransformer', kwargs).double()
    scale = model.layers[1].ffn.gamma2.weight.data.uniform_().clone()
    ffn = idle(model).layers[1].ffn
    assert torch.equal(ffn.layer_scale, scale)
    assert (ffn.dropout_layer.drop_prob, ffn.drop.p) == (0.2, 0.1)
    assert isinstance(ffn.act, nn.ReLU)
    assert ffn.norm1.weight.dtype == torch.float64
