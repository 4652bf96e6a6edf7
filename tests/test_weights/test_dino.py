"""Backbones out of checkpoints of DINO, and what data and checkpoints are refused."""

import argparse
import copy

import cv2
import numpy as np
import pytest
import torch
from mmengine.registry import MODELS

from repa_mm import config_path, reparameterize
from repa_mm.reparam import CheckpointError
from repa_mm.run import init_any_model, init_model, runner_for_training
from repa_mm.run.knn import backbone_of
from repa_mm.weights.layout_dino import dino_to_mm
from repa_mm.weights.layouts import to_repavit

from .test_models.test_dino import MODEL, build

BACKBONE = dict(
    type='RePaVisionTransformer', arch='deit-small', out_type='cls_token', idle_ratio=0.75
)


@pytest.mark.parametrize('network', ['teacher', 'student'])
def test_ours(network, tmp_path, randomize):
    model = randomize(build())
    torch.save(dict(state_dict=model.state_dict()), tmp_path / 'dino.pth')
    assert dino_to_mm(str(tmp_path / 'dino.pth'), str(tmp_path / 'out.pth'), network) is None
    owner = model.teacher if network == 'teacher' else model
    found = torch.load(tmp_path / 'out.pth')['state_dict']
    expected = {f'backbone.{k}': v for k, v in owner.backbone.state_dict().items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)

    # What a detector's backbone starts from, by the tool or by a prefix alone.
    prefix = 'teacher.backbone.' if network == 'teacher' else 'backbone.'
    for path, start in (('out.pth', 'backbone.'), ('dino.pth', prefix)):
        init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / path), prefix=start)
        backbone = MODELS.build({**MODEL['backbone'], 'out_type': 'featmap', 'init_cfg': init_cfg})
        backbone.init_weights()
        for key, value in owner.backbone.state_dict().items():
            assert torch.equal(backbone.state_dict()[key], value), key


@pytest.mark.parametrize('network', ['teacher', 'student'])
def test_layout_of_the_authors(network, tmp_path, randomize):
    backbone = randomize(MODELS.build(BACKBONE))
    state_dict = {f'backbone.{k}': v for k, v in backbone.state_dict().items()}
    theirs = to_repavit(state_dict, config_path('repa_vit_s_dino.py')).state_dict
    prefix = 'module.backbone.' if network == 'student' else 'backbone.'
    theirs = {f'{prefix}{key}': value for key, value in theirs.items()}
    head = {prefix.replace('backbone.', 'head.mlp.0.weight'): torch.zeros(2, 384)}
    other = {'module.backbone.cls_token': torch.zeros(1, 1, 384)}
    other = {'teacher': other, 'student': other, network: {**theirs, **head}}
    torch.save(dict(other, epoch=3, args=argparse.Namespace(arch='vit_small')), tmp_path / 'a.pth')
    done = dino_to_mm(str(tmp_path / 'a.pth'), str(tmp_path / 'b.pth'), network)
    assert done.form == 'training'
    found = torch.load(tmp_path / 'b.pth')['state_dict']
    assert all(torch.equal(found[key], value) for key, value in state_dict.items())


def test_checkpoint_without_teacher(tmp_path):
    path = str(tmp_path / 'classifier.pth')
    torch.save(dict(state_dict={'backbone.cls_token': torch.zeros(1, 1, 384)}), path)
    with pytest.raises(CheckpointError, match='has no teacher.*repavit_to_mm'):
        dino_to_mm(path, str(tmp_path / 'out.pth'))
    with pytest.raises(ValueError, match='network'):
        dino_to_mm(path, str(tmp_path / 'out.pth'), 'pupil')
    assert not (tmp_path / 'out.pth').exists()


def test_merged_checkpoint_is_loaded(tmp_path, randomize):
    config = config_path('demo/dino_repa_vit_photos.py')
    model = randomize(init_model(config))
    merged = reparameterize(model)
    torch.save(dict(state_dict=merged.state_dict()), tmp_path / 'merged.pth')
    loaded = init_any_model(config, str(tmp_path / 'merged.pth'))
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        for network in ('teacher', 'student'):
            found, expected = (backbone_of(m, network)(x)[0] for m in (loaded, model))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def photos(root, count):
    for name in ('a', 'b')[:count]:
        path = root / 'train' / name
        path.mkdir(parents=True)
        cv2.imwrite(str(path / '0.png'), np.zeros((20, 20, 3), np.uint8))
    (root / 'train').mkdir(exist_ok=True, parents=True)
    return {'train_dataloader.dataset.data_root': str(root), 'train_dataloader.num_workers': 0}


@pytest.mark.parametrize('count, message', [(0, 'train data set'), (1, 'fewer than a batch')])
def test_too_few_images(tmp_path, count, message):
    pytest.importorskip('lightly')
    options = photos(tmp_path / 'photos', count)
    options['train_dataloader.persistent_workers'] = False
    with pytest.raises(ValueError, match=message):
        runner_for_training(
            config_path('demo/dino_repa_vit_photos.py'), str(tmp_path / 'w'), cfg_options=options
        )


def test_images_smaller_than_crops_are_enlarged(tmp_path):
    pytest.importorskip('lightly')
    options = photos(tmp_path / 'photos', 2)
    options.update({'train_dataloader.batch_size': 2, 'train_dataloader.persistent_workers': False})
    options['train_cfg.max_epochs'] = 1
    config = config_path('demo/dino_repa_vit_photos.py')
    runner = runner_for_training(config, str(tmp_path / 'w'), cfg_options=options)
    before = copy.deepcopy(runner.model.backbone)
    runner.train()
    name = 'layers.0.attn.qkv.weight'
    assert not torch.equal(runner.model.backbone.get_parameter(name), before.get_parameter(name))
    saved = init_model(config, str(tmp_path / 'w/epoch_1.pth'), 'deploy')
    assert torch.isfinite(saved(torch.randn(1, 3, 64, 64))[0]).all()
