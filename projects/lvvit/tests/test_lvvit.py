"""LV-ViT and token labels."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from mmpretrain.structures import DataSample

import repa_mm  # noqa: F401, registers
from projects.lvvit import LVViT, TokenLabelHead
from projects.lvvit.head import token_targets
from projects.lvvit.model import random_region

ARCH = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=48)


def build(**kwargs):
    return LVViT(ARCH, img_size=64, stem_channels=8, **kwargs)


def test_residual_branches_are_scaled(randomize):
    """y = x + attn(ln1(x)) / 2, z = y + ffn(ln2(y)) / 2."""
    layer = randomize(build()).eval().layers[0]
    x = torch.randn(2, 5, 16)
    fc1, fc2 = layer.ffn.layers[0][0], layer.ffn.layers[1]
    q, k, v = layer.attn.qkv(layer.ln1(x)).view(2, 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
    attn = (q @ k.transpose(2, 3) / 8**0.5).softmax(-1) @ v
    y = x + layer.attn.proj(attn.transpose(1, 2).reshape(2, 5, 16)) / 2
    z = y + fc2(F.gelu(fc1(layer.ln2(y)))) / 2
    assert torch.allclose(layer(x), z, atol=1e-6)


def test_mixed_tokens_are_put_back():
    # Without residual branches, tokens stay what they are before the blocks.
    model = build(
        residual_scale=0.0, final_norm=False, mix_token=True, out_type='token_label'
    ).train()
    torch.nn.init.normal_(model.pos_embed)
    torch.nn.init.normal_(model.cls_token)
    for norm in model.patch_embed.stem[1::3]:
        norm.eval()
    x = torch.randn(4, 3, 64, 48)
    inputs = []
    model.layers[0].register_forward_pre_hook(lambda m, args: inputs.append(args[0]))
    for _ in range(20):
        tokens, hw, share = model(x)[-1]
        mixed = inputs.pop()
        if 0 < share < 1:
            break
    assert hw == (4, 3)
    tokens_alone, _, own = model.eval()(x)[-1]
    assert own == 1
    assert torch.equal(tokens, tokens_alone)
    replaced = (mixed != tokens).any(2)
    assert not replaced[:, 0].any()
    assert replaced[:, 1:].float().mean().item() == pytest.approx(1 - share)
    assert torch.equal((mixed == tokens.flip(0)).all(2)[:, 1:], replaced[:, 1:])


def test_regions_are_rectangles():
    areas = []
    for _ in range(300):
        region = random_region(14, 10)
        areas.append(region.float().mean().item())
        rows, columns = region.any(1), region.any(0)
        assert torch.equal(region, rows[:, None] & columns)
    assert min(areas) == 0 and 0.5 < max(areas) <= 1
    assert 0.2 < np.mean(areas) < 0.4  # a half, less what the border cuts


def test_images_of_any_size_have_tokens_for_all_of_them():
    model = build(out_type='featmap').eval()
    x = torch.randn(1, 3, 65, 79)
    padded = F.pad(x, (0, 1, 0, 15))
    with torch.no_grad():
        assert model(x)[0].shape == (1, 16, 5, 5)
        assert torch.equal(model(x)[0], model(padded)[0])


def test_mixing_needs_a_loss_that_knows_of_it():
    with pytest.raises(ValueError, match="needs out_type='token_label'"):
        build(mix_token=True)


def label_map(height, width, classes=10, seed=0):
    """Random scores of five classes at every place, as in the release."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(classes, height, width, generator=generator) * 9
    return torch.stack([x.half() for x in scores.topk(5, 0)])


def dense(labels, classes=10):
    out = torch.zeros(classes, *labels.shape[2:])
    return out.scatter_(0, labels[1].long(), labels[0].float())


def test_targets_are_the_part_of_the_map_that_a_crop_shows():
    labels = [label_map(6, 8, seed=i) for i in range(3)]
    boxes = [
        torch.tensor([0.0, 0, 1, 1]),
        torch.tensor([0.5, 0, 1, 1]),
        torch.tensor([0.0, 1 / 3, 0.5, 1]),
    ]
    whole, patches = token_targets(labels, boxes, [False, False, True], 10, (2, 2))
    crops = [dense(labels[0]), dense(labels[1])[:, :, 4:], dense(labels[2])[:, 2:, :4].flip(2)]
    for i, crop in enumerate(crops):
        # Every cell is a whole number of places: the mean of these.
        cells = F.adaptive_avg_pool2d(crop, 2).flatten(1)
        assert torch.allclose(patches[i], cells.t().softmax(1), atol=1e-5)
        assert torch.allclose(whole[i], crop.mean((1, 2)).softmax(0), atol=1e-5)


def samples(labels=True):
    out = []
    for i in range(4):
        sample = DataSample().set_gt_label(i)
        if labels:
            sample.set_field(label_map(4, 4, seed=i), 'token_labels')
            sample.set_field(torch.tensor([0.25, 0, 0.75, 1]), 'crop_box')
            sample.set_field(bool(i % 2), 'flip', field_type='metainfo')
        out.append(sample)
    return out


def cross_entropy(scores, targets):
    return -(targets * scores.log_softmax(-1)).sum(-1).mean()


@pytest.mark.parametrize('labels', [False, True])
def test_losses(labels):
    head = TokenLabelHead(10, 16, cls_weight=0.7, dense_weight=0.3)
    tokens, share = torch.randn(4, 7, 16), torch.tensor(0.8)
    data = samples(labels)
    losses = head.loss(((tokens, (3, 2), share),), data)
    if labels:
        whole, patches = token_targets(
            [s.token_labels for s in data],
            [s.crop_box for s in data],
            [s.flip for s in data],
            10,
            (3, 2),
        )
        assert patches.shape == (4, 6, 10)
    else:
        whole = torch.eye(10)[:4]
        patches = whole[:, None].expand(4, 6, 10)
    whole, patches = 0.9 * whole + 0.01, 0.9 * patches + 0.01
    mixed = torch.stack([0.8 * whole[i] + 0.2 * whole[3 - i] for i in range(4)])
    assert losses['loss_cls'].item() == pytest.approx(
        0.7 * cross_entropy(head.fc(tokens[:, 0]), mixed).item(), rel=1e-5
    )
    assert losses['loss_dense'].item() == pytest.approx(
        0.3 * cross_entropy(head.aux_fc(tokens[:, 1:]), patches).item(), rel=1e-5
    )


def test_prediction():
    head = TokenLabelHead(10, 16)
    tokens = torch.randn(2, 5, 16)
    expected = head.fc(tokens[:, 0]) + 0.5 * head.aux_fc(tokens[:, 1:]).max(1)[0]
    feats = ((tokens, (2, 2), torch.ones(())),)
    assert torch.equal(head(feats), expected)
    predictions = head.predict(feats, samples()[:2])
    assert [p.pred_label.item() for p in predictions] == expected.argmax(1).tolist()


@pytest.mark.parametrize('labels', [False, True])
def test_classifier_learns_a_batch(labels):
    model = MODELS.build(
        dict(
            type='mmpretrain.ImageClassifier',
            backbone=dict(
                type='RePaLVViT',
                arch=ARCH,
                img_size=32,
                patch_size=8,
                stem_channels=8,
                idle_ratio=2 / 3,
                mix_token=True,
                out_type='token_label',
            ),
            head=dict(type='TokenLabelHead', num_classes=10, in_channels=16),
        )
    )
    model.init_weights()
    model.train()
    x, data = torch.randn(4, 3, 32, 32), samples(labels)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    totals = []
    for _ in range(30):
        total = sum(model(x, data, mode='loss').values())
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        totals.append(total.item())
    assert all(p.grad is not None for p in model.parameters())
    assert np.mean(totals[-5:]) < 0.9 * totals[0]
