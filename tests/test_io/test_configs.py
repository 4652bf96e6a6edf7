"""Configs, and the models that they describe."""

import sys

import pytest
from mmengine.config import Config

from repa_mm.apis import open_model
from repa_mm.io.command_line import codebase_tool
from repa_mm.io.configs import dataset_config, load_config
from repa_mm.io.paths import config_path, config_root

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
dataset = dict(type='CustomDataset', data_root='data', metainfo=dict(classes=('a', 'b')))
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
    model = open_model(cfg)
    assert not model.training and model.cfg is cfg
    assert model.data_preprocessor.mean.flatten().tolist() == [1, 2, 3]
    assert model.data_preprocessor.std.flatten().tolist() == [2, 2, 2]
    assert model.dataset_meta == dict(classes=('a', 'b'))


def test_data_sets_inside_of_wrappers(config):
    cfg = load_config(config)
    for split in ('train', 'test'):
        assert dataset_config(cfg, split).type == 'CustomDataset'


def test_configs_and_tools_of_installed_codebases(tmp_path):
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


def test_configs_import_what_lies_in_the_working_directory(config, tmp_path, monkeypatch):
    """Python alone looks beside the script, in tools/."""
    monkeypatch.setattr(sys, 'path', list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'lying_here.py').touch()
    with open(config, 'a') as file:
        file.write("custom_imports = dict(imports=['lying_here'], allow_failed_imports=False)")
    load_config(config)
    assert sys.modules.pop('lying_here').__file__ == str(tmp_path / 'lying_here.py')


LAZY = """
from mmengine.config import read_base

with read_base():
    from .base import *

from mmdet.datasets import CocoDataset
from mmdet.models import FPN, DetDataPreprocessor, RetinaHead, RetinaNet
from mmengine.optim import DefaultOptimWrapperConstructor
from mmpretrain.models import ResNet
from torch.nn import BatchNorm2d, Identity

model = dict(
    type=RetinaNet,
    data_preprocessor=dict(type=DetDataPreprocessor),
    backbone=dict(
        type=ResNet, depth=18, out_indices=(1, 2, 3), norm_cfg=dict(type=BatchNorm2d)),
    neck=dict(type=FPN, in_channels=[128, 256, 512], out_channels=32, num_outs=3),
    bbox_head=dict(
        type=RetinaHead, num_classes=2, in_channels=32, feat_channels=32, stacked_convs=1,
        anchor_generator=dict(
            type='AnchorGenerator', octave_base_scale=3, scales_per_octave=3, ratios=[1.0],
            strides=[8, 16, 32])),
)
test_dataloader = dict(dataset=dict(type=CocoDataset, pipeline=[dict(type=Identity)]))
optim_wrapper = dict(constructor=DefaultOptimWrapperConstructor)
"""


def test_classes_of_a_pure_python_config_become_names(tmp_path):
    path = str(tmp_path / 'lazy.py')
    (tmp_path / 'base.py').write_text('default_scope = None\n')
    (tmp_path / 'lazy.py').write_text(LAZY)
    assert codebase_tool([path], 'train.py').startswith(config_root('mmdet')[: -len('configs')])
    cfg = load_config(path, {'model.bbox_head.num_classes': 3})
    assert cfg.default_scope == 'mmdet'
    assert cfg.model.type == 'RetinaNet' and cfg.test_dataloader.dataset.type == 'CocoDataset'
    assert cfg.model.backbone.type == 'mmpretrain.ResNet'  # MMDetection has another one
    assert cfg.model.backbone.norm_cfg.type in ('BN', 'BN2d')
    assert cfg.optim_wrapper.constructor == 'DefaultOptimWrapperConstructor'
    assert 'RetinaNet' not in cfg and cfg.filename == path
    # Written to a file, the codebase reads it.
    written = Config.fromstring(cfg.pretty_text, '.py')
    assert written.to_dict() == cfg.to_dict()
    model = open_model(written)
    assert type(model.backbone).__module__.startswith('mmpretrain.')
    assert model.bbox_head.num_classes == 3


def test_the_scope_of_a_restructured_model(tmp_path):
    (tmp_path / 'lazy.py').write_text(
        'from mmseg.models import EncoderDecoder\n'
        "model = dict(type='Restructured', model=dict(type=EncoderDecoder), structures=[])\n"
    )
    assert load_config(str(tmp_path / 'lazy.py')).default_scope == 'mmseg'
