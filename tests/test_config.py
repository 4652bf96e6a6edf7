"""Configs, and the models that they describe."""

import json
import sys

import pytest
import torch
from mmengine.registry import DATASETS

import repa_mm
from repa_mm.config import build_model, codebase_tool, dataset_config, image_config, load_config
from repa_mm.paths import config_path, config_root
from repa_mm.reparam import CheckpointError, has_deploy_form, has_training_form

BACKBONE = dict(
    type='RePaSwinTransformer',
    arch=dict(embed_dims=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 1, 1]),
    window_size=2,
)
CONFIG = f"""
default_scope = 'mmpretrain'
data_preprocessor = dict(type='ClsDataPreprocessor', mean=[1, 2, 3], std=[1, 1, 1])
model = dict(
    type='ImageClassifier',
    backbone={BACKBONE},
    neck=dict(type='GlobalAveragePooling'),
    head=dict(type='LinearClsHead', num_classes=2, in_channels=64),
)
dataset = dict(type='CustomDataset', metainfo=dict(classes=('a', 'b')))
test_dataloader = dict(dataset=dict(type='RepeatDataset', times=2, dataset=dataset))
train_dataloader = dict(dataset=dict(type='ConcatDataset', datasets=[dataset, dict(type='Other')]))
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / 'config.py'
    path.write_text(CONFIG)
    return str(path)


def test_a_model_has_the_config_s_preprocessor_and_classes(config):
    cfg = load_config(config, {'model.head.num_classes': 2, 'data_preprocessor.std': [2, 2, 2]})
    model = build_model(cfg)
    assert not model.training and model.cfg is cfg
    assert model.data_preprocessor.mean.flatten().tolist() == [1, 2, 3]
    assert model.data_preprocessor.std.flatten().tolist() == [2, 2, 2]
    assert model.dataset_meta == dict(classes=('a', 'b'))


def test_data_sets_inside_of_wrappers(config):
    cfg = load_config(config)
    for split in ('train', 'test'):
        assert dataset_config(cfg, split).type == 'CustomDataset'


def test_images_without_objects_count(tmp_path):
    pytest.importorskip('mmdet')
    images = [dict(id=i, file_name=f'{i}.png', height=64, width=64) for i in range(3)]
    box = dict(id=1, image_id=1, category_id=1, bbox=[2, 2, 40, 40], area=1600, iscrowd=0)
    categories = [dict(id=1, name='zero')]
    (tmp_path / 'found.json').write_text(
        json.dumps(dict(images=images, annotations=[box], categories=categories))
    )
    cfg = load_config(config_path('demo/retinanet_swin_digits.py'))
    files = dict(data_root=str(tmp_path), ann_file='found.json', metainfo=dict(classes=('zero',)))
    cfg.train_dataloader.dataset.update(files)
    assert len(DATASETS.build(cfg.train_dataloader.dataset)) == 1
    dataset = DATASETS.build(image_config(cfg, 'train'))
    assert [dataset.get_data_info(i)['img_id'] for i in range(len(dataset))] == [0, 1, 2]
    assert dataset.pipeline.transforms[-1].meta_keys == cfg.test_pipeline[-1].meta_keys


def test_a_model_takes_the_form_of_its_weights(config, tmp_path, randomize):
    cfg = load_config(config)
    model = randomize(build_model(cfg))
    deployed = repa_mm.reparameterize(model)
    images = torch.randn(2, 3, 64, 64)
    for name, saved in dict(training=model, deploy=deployed).items():
        path = str(tmp_path / f'{name}.pth')
        meta = dict(dataset_meta=dict(classes=('c', 'd')))
        torch.save(dict(meta=meta, state_dict=saved.state_dict()), path)
        loaded = build_model(cfg, path)
        assert has_deploy_form(loaded) == (name == 'deploy') != has_training_form(loaded)
        assert loaded.dataset_meta == meta['dataset_meta']
        with torch.no_grad():
            torch.testing.assert_close(loaded(images), saved(images), rtol=0, atol=0)
    with pytest.raises(CheckpointError):
        build_model(load_config(config, {'model.head.num_classes': 3}), path)


def test_configs_and_tools_of_installed_codebases(tmp_path):
    pytest.importorskip('mmdet')
    assert load_config('mmdet::retinanet/retinanet_r50_fpn_1x_coco.py').model.type == 'RetinaNet'
    config = config_path('retinanet_repa_swin_b')
    for arguments in (
        [config],
        ['--work-dir', 'x', config],
        ['--local_rank=0', config, '--work-dir', 'x'],
        ['--work-dir=other.py', '--resume', 'epoch.pth', config, 'other.pth'],
    ):
        tool = codebase_tool(arguments, 'train.py')
        assert tool.startswith(config_root('mmdet').removesuffix('configs'))
        with open(tool) as file:
            assert 'runner.train()' in file.read()
    assert codebase_tool(['--help'], 'train.py') is None


@pytest.mark.parametrize('read', [load_config, lambda path: codebase_tool([path], 'train.py')])
def test_configs_import_what_lies_in_the_working_directory(read, config, tmp_path, monkeypatch):
    """Python alone looks beside the script, in tools/."""
    monkeypatch.setattr(sys, 'path', list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'lying_here.py').touch()
    with open(config, 'a') as file:
        file.write("custom_imports = dict(imports=['lying_here'], allow_failed_imports=False)")
    read(config)
    assert sys.modules.pop('lying_here').__file__ == str(tmp_path / 'lying_here.py')
