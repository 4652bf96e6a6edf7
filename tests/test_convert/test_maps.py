"""The maps of an UperNet's head are made narrower, in the head's place in a model."""

import copy

import cv2
import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

pytest.importorskip('mmseg')

from mmengine.registry import MODELS, init_default_scope  # noqa: E402
from mmseg.models import UPerHead  # noqa: E402

import repa_mm  # noqa: E402
from repa_mm.benchmark.complexity import count  # noqa: E402
from repa_mm.config import load_config  # noqa: E402
from repa_mm.convert import parts  # noqa: E402
from repa_mm.convert.conversion import Conversion  # noqa: E402
from repa_mm.convert.maps import patches_of  # noqa: E402
from repa_mm.convert.pretrained import convert_checkpoint  # noqa: E402
from repa_mm.faster.uper_head import FastUPerHead  # noqa: E402
from repa_mm.opening import open_model  # noqa: E402
from tests.conftest import random_model  # noqa: E402

CHANNELS, SIZES = [4, 6, 8, 10], [(12, 10), (6, 5), (3, 3), (2, 2)]
HEAD = dict(
    in_channels=CHANNELS, in_index=[0, 1, 2, 3], channels=8, num_classes=3, pool_scales=(1, 2),
    norm_cfg=dict(type='BN'), dropout_ratio=0, align_corners=False,
)  # fmt: skip
SMALL = {
    'model.backbone.arch.depths': [1, 1, 1, 1],
    'model.backbone.arch.embed_dims': 24,
    'model.decode_head.in_channels': [24, 48, 96, 192],
    'model.auxiliary_head.in_channels': 96,
    'model.decode_head.channels': 16,
}


class Segmentor(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        init_default_scope('mmseg')
        self.decode_head = UPerHead(**{**HEAD, **kwargs})

    def forward(self, maps):
        return self.decode_head(maps)


def maps(batch=2):
    return [torch.randn(batch, c, *size) for c, size in zip(CHANNELS, SIZES)]


def segmentor(randomize, **kwargs):
    return randomize(Segmentor(**kwargs)).eval()


def narrowed(model, sizes, batches):
    return Conversion(model, batches, ['convs']).fit({'decode_head.fpn_bottleneck': sizes})


def doubled(model):
    """Let the second half of each level's channels be a multiple of the first half."""
    for module in model.decode_head.fpn_convs:
        for value in (module.conv.weight, *module.bn.parameters(), *module.bn.buffers()):
            if value.ndim:
                value.data[4:] = value.data[:4]
        module.bn.weight.data[4:] *= 3
        module.bn.bias.data[4:] *= 3
    return model


def test_channels_that_say_nothing_new_are_dropped(randomize, relative_error):
    model = doubled(segmentor(randomize))
    batches = [maps() for _ in range(8)]
    narrow, report = narrowed(model, (4, 4, 4), batches)
    with torch.no_grad():
        assert relative_error(narrow(batches[0]), model(batches[0])) < 1e-2
    assert report.blocks[0].unexplained < 1e-4
    assert type(narrow.decode_head) is FastUPerHead and type(model.decode_head) is UPerHead
    assert [m.conv.out_channels for m in narrow.decode_head.fpn_convs] == [4, 4, 4]
    # Others do say something.
    assert narrowed(segmentor(randomize), (4, 4, 4), batches)[1].blocks[0].unexplained > 0.01


def test_with_all_channels_it_is_the_same_model(randomize, relative_error):
    model, x = segmentor(randomize), maps()
    narrow, _ = narrowed(model, (8, 8, 8), [maps(), x])
    with torch.no_grad():
        assert relative_error(narrow(x), model(x)) < 1e-5


def test_the_fit_is_what_the_model_computes_and_least_squares_helps(randomize):
    """What the report says is unexplained is so, and less than without new weights."""
    model, batches = segmentor(randomize), [maps() for _ in range(6)]
    narrow, report = narrowed(model, (3, 5, 8), batches)
    head, thin = (copy.deepcopy(m.decode_head) for m in (model, narrow))
    for one in (head, thin):
        one.fpn_bottleneck.activate = nn.Identity()
        one._forward_feature = type(one)._forward_feature.__get__(one)
    kept = []
    for a, b in zip(thin.fpn_convs, head.fpn_convs):
        same = (a.conv.weight[:, None] - b.conv.weight).abs().flatten(2).amax(2) == 0
        kept.append(same.float().argmax(1).tolist())
    assert [len(set(k)) for k in kept] == [3, 5, 8]
    plain = copy.deepcopy(head)
    index = torch.cat([8 * i + torch.tensor(k) for i, k in enumerate([*kept, list(range(8))])])
    mask = torch.zeros(32)
    mask[index] = 1
    plain.fpn_bottleneck.conv.weight.data *= mask[:, None, None]
    errors = {}
    with torch.no_grad():
        wanted = torch.cat([head._forward_feature(x).movedim(1, -1).flatten(0, 2) for x in batches])
        for name, one in (('thin', thin), ('plain', plain)):
            got = torch.cat([one._forward_feature(x).movedim(1, -1).flatten(0, 2) for x in batches])
            scaled = (wanted - wanted.mean(0)).square().sum()
            errors[name] = float((got - wanted).square().sum() / scaled)
    assert errors['thin'] == pytest.approx(report.blocks[0].unexplained, rel=0.02)
    assert errors['thin'] < 0.5 * errors['plain']


def test_patches_are_what_the_convolution_sees():
    x, weight, chosen = torch.randn(2, 5, 7, 6), torch.randn(4, 5, 3, 3), torch.randperm(84)[:50]
    found = patches_of(x, chosen, (3, 3)).flatten(1) @ weight.flatten(1).t()
    expected = F.conv2d(x, weight, padding=1).movedim(1, -1).flatten(0, 2)[chosen]
    assert torch.allclose(found, expected, atol=1e-4)


def test_multiply_adds_are_counted(randomize):
    model, x = segmentor(randomize), maps(1)
    narrow, report = narrowed(model, (3, 5, 8), [x])
    saved = count(open_fast(model), ([*x],))[1] - count(narrow, ([*x],))[1]
    block = report.blocks[0]
    assert 1e9 * (block.gmacs - block.narrow_gmacs) == pytest.approx(saved, rel=1e-9)


def open_fast(model):
    model = copy.deepcopy(model)
    return repa_mm.faster.faster_parts_(model)


def test_a_budget_takes_from_the_large_maps_first(randomize):
    sizes = Conversion(doubled(segmentor(randomize)), [maps() for _ in range(4)], ['convs'])
    (found,) = sizes.sizes(0.5).values()
    assert found[0] <= 4 and found[2] >= found[0]


@pytest.mark.parametrize(
    'case', ['constant', 'one place', 'no norm', 'dead channel', 'float64', 'aligned']
)
def test_ill_conditioned(case, randomize, relative_error):
    kwargs = dict(norm_cfg=None) if case == 'no norm' else {}
    model = segmentor(randomize, align_corners=case == 'aligned', **kwargs)
    batches = [maps() for _ in range(3)]
    if case == 'constant':
        batches = [[torch.ones_like(x) for x in batch] for batch in batches]
    if case == 'one place':
        batches = [[x[:1, :, :1, :1] for x in batch] for batch in batches]
    if case == 'dead channel':
        model.decode_head.fpn_bottleneck.bn.weight.data[2] = 0
        model.decode_head.fpn_convs[0].bn.weight.data[1] = 0
    if case == 'float64':
        model.double()
        batches = [[x.double() for x in batch] for batch in batches]
    narrow, report = narrowed(model, (4, 4, 8), batches)
    with torch.no_grad():
        out, expected = narrow(batches[0]), model(batches[0])
    assert out.isfinite().all() and out.dtype == expected.dtype
    weight = narrow.decode_head.fpn_bottleneck.conv.weight
    assert weight.abs().max() < 20 * model.decode_head.fpn_bottleneck.conv.weight.abs().max()
    if case in ('constant', 'one place'):  # can be imitated whatever is kept
        assert relative_error(out, expected) < 0.05


def test_what_cannot_be_narrowed_says_why(randomize):
    norm = dict(type='GN', num_groups=2)
    with pytest.raises(ValueError, match='GroupNorm, not a BatchNorm'):
        Conversion(segmentor(randomize, norm_cfg=norm), [maps()], ['convs'])
    with pytest.raises(ValueError, match='no block.* with convs'):
        Conversion(nn.Conv2d(3, 3, 1), [torch.randn(1, 3, 4, 4)], ['convs'])


def test_a_checkpoint(tmp_path, monkeypatch, relative_error):
    """A whole UperNet with narrower FFNs and maps, from its files; it trains on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parts, 'refine', lambda fit, *_: fit)  # takes long
    for i in range(3):
        noise = np.random.default_rng(i).integers(0, 256, (6, 8, 3), np.uint8)
        (tmp_path / 'images').mkdir(exist_ok=True)
        cv2.imwrite(f'images/{i}.png', cv2.resize(noise, (128, 96)))
    config = repa_mm.config_path('demo/upernet_swin_digits.py')
    cfg = load_config(config, SMALL)
    torch.save(dict(state_dict=random_model(cfg).state_dict()), 'own.pth')
    result = convert_checkpoint(
        config, 'own.pth', 'narrow.pth', 0.1, ['ffn', 'convs'], num_images=2,
        images='images', device='cpu', cfg_options=SMALL,
    )  # fmt: skip
    found = load_config('narrow.py')
    head = found.model.decode_head
    assert head.type == 'FastUPerHead' and len(head.map_channels) == 3
    block = result['report'].blocks[-1]
    assert tuple(head.map_channels) == block.after and sum(block.after) < 48
    model = open_model(found, 'narrow.pth')  # loads strictly
    x = torch.randn(1, 3, 160, 160)
    with torch.no_grad():
        assert model(x).shape == open_model(cfg, 'own.pth')(x).shape
    train = MODELS.build(found.model).train()
    train.load_state_dict(torch.load('narrow.pth', weights_only=False)['state_dict'])
    train(x.repeat(2, 1, 1, 1)).square().mean().backward()
    assert all(p.grad is not None for p in train.decode_head.fpn_convs.parameters())


def test_a_segmentor_that_calls_its_heads_forward(randomize):
    """As MMSegmentation's ``mode='tensor'``, by which hooks of the head do not run."""
    cfg = load_config(repa_mm.config_path('demo/upernet_swin_digits.py'), SMALL)
    model, images = randomize(random_model(cfg)).eval(), [torch.randn(1, 3, 96, 96)]
    conversion = Conversion(model, images, ['convs'], forward=lambda model, x: model(x))
    assert [*conversion.parts] == ['decode_head.fpn_bottleneck'] and not conversion.skipped


@pytest.mark.parametrize(
    'change, message',
    [
        (lambda head: setattr(head.fpn_convs[1], 'conv', nn.Conv2d(8, 8, 3, groups=2)), 'groups=2'),
        (lambda head: head.fpn_convs.__setitem__(1, head.fpn_convs[0]), 'share a convolution'),
        (lambda head: setattr(head.fpn_bottleneck, 'activate', nn.Softmax(1)), 'has a Softmax'),
        (lambda head: head.fpn_convs[0].conv.register_forward_hook(print), 'hook'),
    ],
)
def test_other_heads_are_refused(change, message, randomize):
    model = segmentor(randomize)
    change(model.decode_head)
    with pytest.raises(ValueError, match=message):
        Conversion(model, [maps()], ['convs'])


@pytest.mark.parametrize('changes', [dict(dilation=2, padding=2), dict(stride=2, padding=1)])
def test_a_head_with_another_convolution_stays(changes, randomize):
    model = segmentor(randomize)
    model.decode_head.fpn_bottleneck.conv = nn.Conv2d(32, 8, 3, **changes)
    assert type(open_fast(model).decode_head) is UPerHead


def test_map_channels_are_of_all_levels():
    with pytest.raises(ValueError, match='a number for each of 3 maps'):
        FastUPerHead(**HEAD, map_channels=[4, 4])
