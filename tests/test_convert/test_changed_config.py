"""Configs of converted models, and of those with exact parts alone."""

import copy

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS

from repa_mm.apis import open_model
from repa_mm.convert.changed_config import converted_config
from repa_mm.export import noise, resized
from repa_mm.faster import rewrite_
from repa_mm.faster.attention import FastShiftWindowMSA
from repa_mm.faster.deformable import FastDeformableAttention
from repa_mm.faster.uper_head import FastUPerHead
from repa_mm.io.configs import load_config
from repa_mm.models.sites import attention_sites, ffn_sites
from tests.conftest import random_model
from tests.test_export.conftest import write_config

CASES = dict(
    retinanet=(FastShiftWindowMSA,), upernet=(FastUPerHead, FastShiftWindowMSA),
    dino=(FastDeformableAttention,),
)  # fmt: skip


def kinds(model):
    return {type(module) for module in model.modules()}


@pytest.mark.parametrize('task', CASES)
def test_the_config_is_of_the_same_model(task, tmp_path, monkeypatch, randomize):
    if task == 'dino':
        from tests.test_export.zoo import detr_config, small_model

        cfg = detr_config('DINO')
        stock = small_model(cfg)
    else:
        cfg = load_config(write_config(task, tmp_path, repa=False))
        stock = randomize(random_model(cfg))
    monkeypatch.chdir(tmp_path)
    torch.save(dict(state_dict=stock.state_dict()), 'stock.pth')
    before = copy.deepcopy(cfg.model)
    done = rewrite_(copy.deepcopy(stock), 'train')
    converted_config(cfg, stock, rewritten=done).dump('faster.py')
    assert cfg.model == before
    data = resized(noise(cfg), [(128, 160)])
    faster = open_model(load_config('faster.py'), 'stock.pth')
    expected = {*CASES[task]}
    assert expected <= kinds(faster) and not expected & kinds(stock)
    found, wanted = (model.test_step(copy.deepcopy(data))[0] for model in (faster, stock))
    if task == 'upernet':
        same = found.pred_sem_seg.data == wanted.pred_sem_seg.data
        assert same.float().mean() > 0.999 and len(wanted.pred_sem_seg.data.unique()) > 1
    else:
        found, wanted = (x.pred_instances.scores for x in (found, wanted))
        assert len(wanted) > 5 and torch.allclose(found, wanted, atol=1e-5)
    # Narrower models keep the parts, and nothing changes where there are none.
    cfg = load_config('faster.py')
    assert converted_config(cfg, faster, rewritten=rewrite_(faster, 'train')) is cfg
    sizes = {s.block_name: (8,) for s in ffn_sites(faster)}
    narrow = MODELS.build(converted_config(cfg, faster, sizes).model)
    assert expected <= kinds(narrow)
    assert {s.parts().fc1.out_features for s in ffn_sites(narrow)} == {8}


ARCH = dict(embed_dims=8, depths=(1, 2), num_heads=(1, 2))


@pytest.mark.parametrize('whole', [False, True])
def test_training_needs_no_weights_of_the_original(whole):
    """Not even those that the config of a model inside of another names."""
    missing = dict(type='Pretrained', checkpoint='none.pth')
    backbone = dict(type='mmpretrain.SwinTransformer', arch=ARCH, out_indices=(1,))
    backbone['init_cfg'] = [dict(type='TruncNormal', layer='Linear'), missing]
    model = dict(
        type='mmpretrain.ImageClassifier',
        backbone=dict(type='Restructured', model=backbone, structures=[]),
        head=dict(type='mmpretrain.LinearClsHead', num_classes=2, in_channels=16),
        pretrained='none.pth',
    )
    if whole:
        model = dict(type='Restructured', model=model, structures=[], init_cfg=missing)
    built = MODELS.build(Config(dict(model=model)).model)
    name = ffn_sites(built)[0].block_name
    found = converted_config(Config(dict(model=model)), built, {name: (4,)}).model
    MODELS.build(found).init_weights()
    assert 'none.pth' not in str(found) and 'structures' in str(found)


def test_backbones_of_timm_download_no_weights():
    sizes = dict(img_size=32, embed_dim=16, depth=1, num_heads=2)
    backbone = dict(type='mmseg.TIMMBackbone', model_name='vit_tiny_patch16_224', **sizes)
    backbone.update(features_only=False, pretrained=False)
    model = torch.nn.Module()
    model.backbone = MODELS.build(dict(backbone))
    cfg = Config(dict(model=dict(type='EncoderDecoder', backbone=dict(backbone, pretrained=True))))
    given = {'backbone.timm_model.blocks.0': (8,), 'backbone.timm_model.blocks.0.attn': (4, 4)}
    found = converted_config(cfg, model, given).model.backbone
    assert found.model.pretrained is False
    built = MODELS.build(found)
    assert len(ffn_sites(built)[0].modules().fc1.weight) == 8
    assert attention_sites(built)[0].parts().dims == (4, 4)
