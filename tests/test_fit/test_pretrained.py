"""A trained vanilla model becomes one with channel-idle FFNs, by the tool and its files."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS

import repa_mm
from repa_mm.benchmark.plots import plot_sweep
from repa_mm.benchmark.sweep import sweep_text
from repa_mm.fit.conversion import ConversionReport, differences
from repa_mm.fit.distillation import distill_checkpoint
from repa_mm.fit.pretrained import CalibrationImages, convert_checkpoint, result_text
from repa_mm.reparam import CheckpointError, has_training_form
from repa_mm.run import (
    init_model,
    load_config,
    reparameterize_checkpoint,
    runner_for_testing,
    runner_for_training,
)

from .conftest import TASKS

PACKAGE = dict(retinanet='mmdet', mask_rcnn='mmdet', upernet='mmseg')


def trained(task, folder):
    """A checkpoint of a vanilla demo model, of which nothing is at its defaults."""
    pytest.importorskip(PACKAGE[task])
    config = repa_mm.config_path(f'demo/{task}_swin_digits.py')
    torch.manual_seed(0)
    model = MODELS.build(load_config(config).model)
    model.init_weights()
    for key, value in model.state_dict().items():
        if value.is_floating_point():
            value += 0.02 * torch.randn_like(value)
            if key.endswith('running_var'):
                value.abs_()
    path = folder / f'{task}.pth'
    meta = dict(dataset_meta=dict(classes=tuple('0123456789')), epoch=3)
    torch.save(dict(state_dict=model.state_dict(), meta=meta), path)
    return config, str(path)


@pytest.mark.parametrize('task', TASKS)
def test_ratio_zero_is_the_same_model(task, in_digits):
    config, checkpoint = trained(task, in_digits)
    out = in_digits / 'converted' / 'idle.pth'
    result = convert_checkpoint(config, checkpoint, str(out), idle_ratio=0.0, num_images=2)
    assert isinstance(result['report'], ConversionReport)
    assert max(result['differences']) < 1e-8
    before, after = init_model(config, checkpoint), init_model(result['config'], str(out))
    image = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        for a, b in zip(before.backbone(image), after.backbone(image)):
            assert (a - b).abs().max() < 1e-5 * a.abs().max()
    backbone = {k for k in after.state_dict() if k.startswith('backbone.')}
    own = before.state_dict()
    for key, value in after.state_dict().items():
        assert key in backbone or torch.equal(value, own[key])
    assert torch.load(out, weights_only=False)['meta']['dataset_meta']['classes'][3] == '3'


@pytest.mark.parametrize('norm', ['keep', 'fold'])
def test_trains_on_tests_and_merges(norm, in_digits):
    config, checkpoint = trained('retinanet', in_digits)
    out = in_digits / 'idle.pth'
    result = convert_checkpoint(
        config, checkpoint, str(out), 0.5, norm, num_images=6, select='score'
    )
    assert result['images'] + result['held_out'] == 7
    assert result['macs'][1] < 0.8 * result['macs'][0]
    work = str(in_digits / 'work')
    metrics = [
        runner_for_testing(result['config'], str(out), work, form).test()
        for form in ('training', 'deploy')
    ]
    assert metrics[0] == pytest.approx(metrics[1], abs=1e-3)
    merged = str(in_digits / 'merged.pth')
    reparameterize_checkpoint(result['config'], str(out), merged)
    assert runner_for_testing(result['config'], merged, work).test() == pytest.approx(metrics[1])
    options = {'train_cfg.max_epochs': 1, 'train_dataloader.batch_size': 4}
    runner = runner_for_training(result['config'], work, cfg_options=options)
    start = torch.load(out, weights_only=False)['state_dict']
    runner.train()
    model = runner.model
    assert has_training_form(model)
    key = 'backbone.stages.0.blocks.0.ffn.fc2.weight'
    moved = (model.state_dict()[key] - start[key]).abs().max()
    assert 0 < moved < 0.1
    # Where there is nothing to resume from, the converted weights are what training begins with.
    for more, loaded in ((dict(resume='auto'), True), (dict(from_scratch=True), False)):
        work = str(in_digits / 'new')
        new = runner_for_training(result['config'], work, cfg_options=options, **more)
        new.load_or_resume()
        assert torch.equal(new.model.state_dict()[key], start[key]) == loaded and new.iter == 0


def test_a_folder_of_images_and_a_users_own_config(in_digits, digits, monkeypatch):
    """From a config outside of the repository, whose own hooks and imports stay."""
    config, checkpoint = trained('retinanet', in_digits)
    own = in_digits / 'mine' / 'config.py'
    own.parent.mkdir()
    own.write_text(
        f'_base_ = {config!r}\n'
        "custom_imports = dict(imports=['json'], allow_failed_imports=False)\n"
        "custom_hooks = [dict(type='NumClassCheckHook')]\n"
        'model = dict(bbox_head=dict(num_classes=10))\n'
    )
    out = in_digits / 'elsewhere' / 'idle.pth'
    folder = os.path.join('data', 'demo', 'coco', 'val2017')
    result = convert_checkpoint(
        str(own), checkpoint, str(out), [0.9, 0.5] * 5, num_images=3, images=folder,
        select='score',
        cfg_options={'model.bbox_head.loss_cls.gamma': 1.5, 'param_scheduler.0.end': 7},
    )  # fmt: skip
    cfg = Config.fromfile(result['config'])
    assert cfg.custom_imports.imports == ['json', 'repa_mm']
    assert [h.type for h in cfg.custom_hooks] == ['NumClassCheckHook', 'ReparameterizeHook']
    assert cfg.model.backbone.idle_ratio == [0.9, 0.5] * 5
    assert cfg.model.bbox_head.loss_cls.gamma == 1.5 and cfg.model.bbox_head.num_classes == 10
    assert cfg.param_scheduler[0].end == 7 and len(cfg.param_scheduler) == 2
    # Both folders move together.
    os.rename(in_digits / 'elsewhere', in_digits / 'moved')
    os.rename(in_digits / 'mine', in_digits / 'elsewhere')
    os.rename(in_digits / 'elsewhere', in_digits / 'mine')
    init_model(str(in_digits / 'moved' / 'idle.py'), str(in_digits / 'moved' / 'idle.pth'))


def test_a_config_and_a_folder_that_are_links(in_digits):
    config, checkpoint = trained('retinanet', in_digits)
    deep, mine, shared = (in_digits / name for name in ('real/deep', 'mine', 'shared'))
    for folder in (deep, mine, shared):
        folder.mkdir(parents=True)
    (in_digits / 'link').symlink_to(deep)
    (mine / 'base.py').write_text(f'_base_ = {config!r}')
    (shared / 'model.py').write_text("_base_ = 'base.py'")
    (mine / 'model.py').symlink_to(shared / 'model.py')
    out = in_digits / 'link' / 'idle.pth'
    convert_checkpoint(str(mine / 'model.py'), checkpoint, str(out), 0.0, num_images=1)
    for folder in ('link', 'real/deep'):
        init_model(str(in_digits / folder / 'idle.py'), str(in_digits / folder / 'idle.pth'))


CLASSIFIER = """
default_scope = 'mmpretrain'
data_preprocessor = dict(mean=[100, 110, 120], std=[50, 60, 70], to_rgb=True, num_classes=2)
arch = dict(embed_dims=16, depths=[1, 1], num_heads=[1, 2])
model = dict(
    type='ImageClassifier',
    backbone=dict(type='SwinTransformer', img_size=64, arch=arch, out_indices=(1,)),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(type='LinearClsHead', num_classes=2, in_channels=32),
)
pipeline = [
    dict(type='LoadImageFromFile'), dict(type='Resize', scale=(64, 64)), dict(type='PackInputs')
]
test_dataloader = dict(
    batch_size=1,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='CustomDataset', data_root='data', pipeline=pipeline),
)
test_cfg = dict()
test_evaluator = dict(type='Accuracy')
"""


def classifier(folder, head='', text=CLASSIFIER):
    pytest.importorskip('mmpretrain')
    config, checkpoint = folder / 'classifier.py', folder / 'classifier.pth'
    config.write_text(text)
    torch.manual_seed(0)
    model = MODELS.build(load_config(str(config)).model)
    torch.save(dict(state_dict=model.state_dict(), meta={}), checkpoint)
    config.write_text(head + text)
    return str(config), str(checkpoint)


def meta_of(path):
    return torch.load(path, weights_only=False)['meta']


PARTS_OF_A_USER = """
import torch.nn as nn
from mmpretrain.models import SwinTransformer
from mmengine.registry import MODELS


@MODELS.register_module()
class WithoutInitCfg(SwinTransformer):
    def __init__(self, arch, img_size, out_indices):
        super().__init__(arch, img_size, out_indices=out_indices)


@MODELS.register_module()
class WithDeploy(SwinTransformer):
    def __init__(self, *args, deploy, **kwargs):
        super().__init__(*args, **kwargs)
"""


def test_configs_of_users(in_digits, monkeypatch):
    (in_digits / 'parts_of_a_user.py').write_text(PARTS_OF_A_USER)
    monkeypatch.syspath_prepend(in_digits)
    images = os.path.join('data', 'demo', 'coco', 'val2017')
    out = in_digits / 'idle.pth'

    def converted(tail='', old='', new=''):
        config, checkpoint = classifier(in_digits, text=CLASSIFIER.replace(old, new) + tail)
        found = convert_checkpoint(
            config, checkpoint, str(out), num_images=2, images=images, select='score'
        )
        assert has_training_form(init_model(found['config'], str(out)))
        return load_config(found['config'])

    kind = "type='SwinTransformer'"
    imports = "\ncustom_imports = dict(imports='parts_of_a_user')\n"
    converted(old=kind, new=f"_scope_='mmpretrain', {kind}")
    converted(imports, kind, "type='WithoutInitCfg'")
    absent = "\ncustom_imports = dict(imports=['no_such_module'], allow_failed_imports=True)\n"
    converted(absent)
    # Training on must not replace the original checkpoint, nor start from it.
    cfg = converted(
        "\nwork_dir = 'work_dirs/mine'\n"
        "default_hooks = dict(checkpoint=dict(type='CheckpointHook', out_dir='work_dirs/mine'))\n"
        "model['init_cfg'] = dict(type='Pretrained', checkpoint='classifier.pth')\n"
    )
    assert cfg.work_dir == str(in_digits / 'idle') and cfg.default_hooks.checkpoint.out_dir is None
    assert cfg.model.init_cfg is None
    # What cannot be written is refused before any fit, and leaves what was there.
    before = out.read_bytes()
    monkeypatch.setattr('repa_mm.fit.pretrained.convert_pretrained', None)
    for case in (
        dict(tail=imports, old=kind, new="type='WithDeploy', deploy=False"),
        dict(tail="\ncustom_hooks = [dict(type='CheckpointHook', interval=float('inf'))]\n"),
    ):
        with pytest.raises(ValueError, match='would be a config that cannot be used'):
            converted(**case)
    assert out.read_bytes() == before and not list(in_digits.glob('tmp*'))


def test_images_of_one_channel(in_digits):
    text = CLASSIFIER.replace('img_size=64', 'img_size=64, in_channels=1').replace(
        "dict(type='LoadImageFromFile')", "dict(type='LoadImageFromFile', color_type='grayscale')"
    )
    text = re.sub(r'mean=.*?std=\[[^]]*\]', 'mean=[100], std=[50]', text, flags=re.DOTALL)
    text = text.replace('to_rgb=True', 'to_rgb=False')
    config, checkpoint = classifier(in_digits, text=text)
    out = str(in_digits / 'idle.pth')
    images = os.path.join('data', 'demo', 'coco', 'val2017')
    found = convert_checkpoint(config, checkpoint, out, num_images=2, images=images, select='score')
    assert found['macs'][1] < found['macs'][0]
    assert reparameterize_checkpoint(found['config'], out, 'merged.pth')['error'] < 1e-5


@pytest.mark.parametrize(
    'backbone',
    [
        "type='BEiTViT', img_size=64, patch_size=16, out_type='avg_featmap', "
        'arch=dict(embed_dims=16, num_layers=1, num_heads=2, feedforward_channels=64)',
        "type='TNT', img_size=64, arch=dict(embed_dims_outer=16, embed_dims_inner=8, "
        'num_layers=2, num_heads_outer=2, num_heads_inner=2)',
    ],
)
def test_backbones_that_take_one_size(backbone, in_digits):
    """Not all say which."""
    text = CLASSIFIER.replace(
        "type='SwinTransformer', img_size=64, arch=arch, out_indices=(1,)", backbone
    )
    text = text.replace("neck=dict(type='GlobalAveragePooling'),", '').replace('=32', '=16')
    config, checkpoint = classifier(in_digits, text=text)
    images = os.path.join('data', 'demo', 'coco', 'val2017')
    found = convert_checkpoint(
        config, checkpoint, str(in_digits / 'idle.pth'), num_images=2, images=images, select='score'
    )
    assert found['size'] == (64, 64) and found['macs'][1] < found['macs'][0]
    # The rows of an inner block of a TNT are patches: there are 16 of them in an image.
    rows = {row.name: row for row in found['report'].blocks}
    inner = rows.get('layers.0.inner_block')
    assert inner is None or inner.gmacs == pytest.approx(16 * 16 * 2 * 8 * 32 / 1e9)


def test_a_classifier_whose_normalization_is_beside_the_model(in_digits, call):
    """As in MMPretrain's own configs, which leave the log to MMEngine's defaults, too."""
    config, checkpoint = classifier(in_digits)
    mean = [100, 110, 120]
    assert load_config(config).model.data_preprocessor.mean == mean
    out = in_digits / 'idle.pth'
    folder = os.path.join('data', 'demo', 'coco', 'val2017')
    status, said = call(
        'convert_pretrained', config, checkpoint, out, '--images', folder, '--num-images', '3',
        '--select', 'score', '--distill', '4',
    )  # fmt: skip
    assert status == 0, said
    model = init_model(str(in_digits / 'idle.py'), str(out))
    runner = runner_for_training(str(in_digits / 'idle_distill.py'), str(in_digits / 'work'))
    for found in (model, runner.model):
        assert found.data_preprocessor.mean.flatten().tolist() == mean
    # Steps that are far too large: what was fitted stays.
    wild = in_digits / 'wild.py'
    wild.write_text(
        "_base_ = 'idle_distill.py'\n"
        'optim_wrapper = dict(optimizer=dict(lr=1e20))\n'
        "param_scheduler = [dict(type='ConstantLR', factor=1.0, by_epoch=False)]\n"
    )
    before = out.read_bytes()
    with pytest.raises(CheckpointError, match='distillation has failed.*not finite'):
        distill_checkpoint(str(wild), str(out))
    assert out.read_bytes() == before


def test_the_config_that_is_written(in_digits):
    """What MMEngine allows in the original one."""
    config, checkpoint = classifier(
        in_digits,
        "custom_imports = dict(imports='json')\n"
        'resume = True\n'
        "optim_wrapper = dict(optimizer=dict(type='AdamW', lr=1e-3, betas=(0.8, 0.9)))\n",
    )
    optimizer = dict(_delete_=True, type='SGD', lr=0.1)
    images = os.path.join('data', 'demo', 'coco', 'val2017')
    found = convert_checkpoint(
        config, checkpoint, str(in_digits / 'idle.pth'), 1.0, num_images=2, images=images,
        cfg_options={'optim_wrapper.optimizer': optimizer},
    )  # fmt: skip
    cfg = load_config(found['config'])
    assert cfg.custom_imports.imports == ['json', 'repa_mm'] and not cfg.resume
    assert cfg.optim_wrapper.optimizer == dict(type='SGD', lr=0.1)
    # MMEngine's inferencers build this one if they get the weights alone.
    model = MODELS.build(Config.fromstring(meta_of(in_digits / 'idle.pth')['cfg'], '.py').model)
    assert has_training_form(model)
    reparameterize_checkpoint(found['config'], str(in_digits / 'idle.pth'), 'merged.pth')
    model = MODELS.build(Config.fromstring(meta_of('merged.pth')['cfg'], '.py').model)
    with pytest.raises(CheckpointError, match='is reparameterized'):
        model.load_state_dict(torch.load('merged.pth')['state_dict'])
    # A second conversion replaces its own config.
    convert_checkpoint(config, checkpoint, str(in_digits / 'idle.pth'), 1.0, images=images)


def test_images_of_all_training_data(in_digits):
    cfg = load_config(repa_mm.config_path('demo/retinanet_swin_digits.py'))
    single = cfg.train_dataloader.dataset
    number = len(CalibrationImages(cfg, 10**6))
    other = dict(
        single, data_prefix=dict(img='val2017/'), ann_file='annotations/instances_val2017.json'
    )
    cfg.train_dataloader.dataset = dict(type='ConcatDataset', datasets=[single, other])
    images = CalibrationImages(cfg, 10**6)
    assert len(images) > number
    names = [batch['data_samples'][0].img_path for batch in images]
    assert len(set(names)) == len(names) and any('val2017' in name for name in names)


def test_bad_input_leaves_nothing(in_digits, call):
    config, checkpoint = trained('retinanet', in_digits)
    out = in_digits / 'out' / 'idle.pth'
    empty = in_digits / 'empty'
    empty.mkdir()
    nan = torch.load(checkpoint, weights_only=False)
    nan['state_dict']['backbone.stages.1.blocks.0.ffn.layers.1.bias'][0] = float('nan')
    torch.save(nan, in_digits / 'nan.pth')
    idle = repa_mm.config_path('demo/retinanet_repa_swin_digits.py')
    (in_digits / 'lazy').mkdir()
    lazy, weights = classifier(
        in_digits / 'lazy', 'from mmpretrain.models import ImageClassifier\n'
    )
    own = in_digits / 'idle_distill.py'
    own.write_text(f'_base_ = {config!r}')
    for arguments, message in (
        ((config, checkpoint, out, '--images', empty), 'no image to calibrate on'),
        ((config, checkpoint, out, '--images', in_digits / 'none'), 'no folder of images'),
        ((config, checkpoint, out, '--num-images', 0), 'at least 1, but is 0'),
        ((config, checkpoint, out, '--idle-ratio', 1.5), 'from 0'),
        ((config, checkpoint, out, '--distill', 1), 'at least 2 iterations'),
        ((own, checkpoint, in_digits / 'idle.pth', '--distill', 4), 'is the input'),
        ((lazy, weights, out), 'pure Python'),
        ((config, checkpoint, out, '--idle-ratio', 0.5, 0.5), '10 blocks'),
        ((config, in_digits / 'nan.pth', out), 'ffn.layers.1.bias'),
        ((config, checkpoint, checkpoint), 'is the input'),
        ((config, checkpoint, out.with_suffix('.py')), 'name it'),
        ((config, checkpoint, out.with_suffix('.safetensors')), 'name it'),
        ((config, checkpoint, in_digits / 'idle_0.5'), 'name it'),
        ((config, checkpoint, in_digits / 'lazy' / 'classifier.pt'), 'not written by this tool'),
        ((config, checkpoint, out, '--sweep', '--idle-ratio', 0.5, 1.5), 'from 0'),
        ((config, checkpoint, out, '--sweep', '--distill', 1), 'at least 2 iterations'),
        ((idle, checkpoint, out), 'vanilla'),
        ((repa_mm.config_path('demo/upernet_swin_digits.py'), checkpoint, out), 'another model'),
    ):
        status, said = call('convert_pretrained', *map(str, arguments))
        assert status != 0 and message in said and 'Traceback' not in said, said
        assert not out.exists() and not Path(out).with_suffix('.py').exists()


def test_multiply_adds_instead_of_a_ratio(in_digits, call):
    config, checkpoint = trained('retinanet', in_digits)
    out = in_digits / 'idle.pth'
    found = convert_checkpoint(
        config, checkpoint, str(out), num_images=2, target_gmacs=0.7, allocate='by_error'
    )
    assert found['size'] == (224, 224)
    assert found['macs'][1] == pytest.approx(0.7e9, rel=0.02)
    ratios = Config.fromfile(found['config']).model.backbone.idle_ratio
    assert len(ratios) == 10 and len(set(ratios)) > 1
    init_model(found['config'], str(out))
    status, said = call('convert_pretrained', config, checkpoint, out, '--target-gmacs', '9')
    assert status != 0 and 'no idle ratio gives the backbone 9 GMACs at 224x224' in said


def test_an_interrupted_conversion_goes_on(in_digits):
    config, checkpoint = trained('retinanet', in_digits)
    out, whole = in_digits / 'idle.pth', in_digits / 'whole.pth'
    seen = []

    def stop(row):
        seen.append(row.name)
        if len(seen) == 3:
            raise KeyboardInterrupt

    folder = os.path.join('data', 'demo', 'coco', 'val2017')
    arguments = dict(num_images=2, images=folder, select='score')
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(config, checkpoint, str(out), progress=stop, **arguments)
    assert sorted(path.name for path in in_digits.iterdir()) == ['idle.partial', 'retinanet.pth']
    convert_checkpoint(config, checkpoint, str(out), resume=True, **arguments)
    convert_checkpoint(config, checkpoint, str(whole), resume=True, **arguments)
    weights = [torch.load(p, weights_only=False)['state_dict'] for p in (out, whole)]
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())
    assert not list(in_digits.glob('*.partial'))


def test_too_little_memory(in_digits, call, monkeypatch):
    config, checkpoint = trained('retinanet', in_digits)
    from repa_mm.run import pretrained

    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")):

        def fail(*args, error=error, **kwargs):
            raise error

        monkeypatch.setattr(pretrained, 'convert_pretrained', fail)
        status, said = call('convert_pretrained', config, checkpoint, in_digits / 'idle.pth')
        assert status != 0 and 'lower --num-images' in said
        assert not (in_digits / 'idle.pth').exists()


def test_what_is_said_of_a_distillation():
    result = dict(
        report=ConversionReport(), images=8, held_out=1, macs=(2e9, 1e9), size=(224, 224),
        config='idle.py', distilled=[0.123], for_heads=([0.2], [0.1]),
    )  # fmt: skip
    for seen in (False, True):
        said = result_text(dict(result, seen=seen), 'idle.pth')
        assert 'after the distillation they differ by 12 %' in said
        assert 'differed by 20 % before, and by 10 % after it' in said
        assert ('which it learns from' in said) == seen


def test_difference_of_a_single_vector():
    """It has no variance: the change is relative to its mean square."""
    vector = torch.tensor([[3.0, 4.0]])
    assert differences([[vector]], [[1.1 * vector]]) == pytest.approx([0.01])


def test_few_images_are_mostly_fitted_to(in_digits):
    config, checkpoint = trained('retinanet', in_digits)
    folder = in_digits / 'images'
    folder.mkdir()
    paths = sorted(Path('data', 'demo', 'coco', 'val2017').iterdir())
    for i in range(10):
        shutil.copy(paths[i % len(paths)], folder / f'{i}.jpg')
    # MMEngine's initialization would come after the weights: an option for it changes nothing.
    options = {'model.backbone.init_cfg': dict(type='Pretrained', checkpoint='none.pth')}
    found = convert_checkpoint(
        config, checkpoint, str(in_digits / 'idle.pth'), 1.0, images=str(folder),
        cfg_options={**options, 'model.backbone.init_cfg.checkpoint': 'other.pth'},
    )  # fmt: skip
    assert (found['images'], found['held_out']) == (9, 1)


@pytest.mark.parametrize('images', [None, os.path.join('data', 'demo', 'coco', 'val2017')])
def test_distillation(images, in_digits, call):
    config, checkpoint = trained('retinanet', in_digits)
    out = in_digits / 'idle.pth'
    more = ['--images', images] if images else []
    status, said = call(
        'convert_pretrained', config, checkpoint, out, '--num-images', '3', '--distill', '4',
        '--idle-ratio', '0.9', '--select', 'score', '--cfg-options',
        'train_dataloader.batch_size=2', *more,
    )  # fmt: skip
    assert status == 0, said
    # Its config trains further, with MMEngine's own means, and where the tool has left off.
    work = str(in_digits / 'work')
    runner = runner_for_training(str(in_digits / 'idle_distill.py'), resume='auto')
    assert runner.work_dir == str(in_digits / 'idle_distill') and runner._resume
    assert (in_digits / 'idle_distill' / 'iter_4.pth').exists()
    assert runner.model.state_dict().keys() == torch.load(out)['state_dict'].keys()
    assert runner.max_iters == 4
    data = runner.train_dataloader.dataset
    if images:
        # What the difference is measured on is not learned from.
        held_out = CalibrationImages(load_config(config), 4, images).dataset.paths
        assert len(data) == len(held_out) - 1 and set(data.paths) < set(held_out)
    model = init_model(str(in_digits / 'idle.py'), str(out))
    assert has_training_form(model)
    assert runner_for_testing(str(in_digits / 'idle.py'), str(out), work, 'deploy').test()


def test_a_distillation_brings_the_features_for_the_heads_nearer(in_digits):
    pytest.importorskip('mmpretrain')
    config, checkpoint = classifier(in_digits)
    images = os.path.join('data', 'demo', 'coco', 'val2017')
    found = convert_checkpoint(
        config, checkpoint, str(in_digits / 'idle.pth'), 1.0, 'fold', 4, images, distill=30
    )
    fitted, distilled = found['for_heads']
    assert len(fitted) == 1 and 0 < distilled[0] < fitted[0]


def test_an_earlier_distillation_is_not_gone_on_with(in_digits, monkeypatch):
    config, checkpoint = trained('retinanet', in_digits)
    out = str(in_digits / 'idle.pth')
    earlier = in_digits / 'idle_distill' / 'last_checkpoint'
    earlier.parent.mkdir()
    earlier.write_text('iter_9.pth')

    def stopped(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr('repa_mm.fit.pretrained.distill_checkpoint', stopped)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(config, checkpoint, out, num_images=1, select='score', distill=4)
    assert (in_digits / 'idle_distill.py').exists() and not earlier.exists()


def test_sweep(in_digits, call):
    config, checkpoint = trained('retinanet', in_digits)
    # As an ordinary conversion, with weights that the model does not have.
    loaded = torch.load(checkpoint, weights_only=False)
    loaded['state_dict']['neck.of_another_version'] = torch.ones(1)
    torch.save(loaded, checkpoint)
    out = in_digits / 'sweep'
    arguments = (
        'convert_pretrained', config, checkpoint, out, '--sweep', '--idle-ratio', '0', '1',
        '--num-images', '2', '--cfg-options', 'model.backbone.drop_path_rate=0.1', '--test',
        '--select', 'score',
    )  # fmt: skip
    status, said = call(*arguments)
    assert status == 0, said
    found = json.loads((out / 'sweep.json').read_text())['rows']
    assert [row['name'] for row in found] == ['original', 'idle_0', 'idle_1']
    assert found[1]['difference'] < 1e-8 < 1e-3 < found[2]['difference']
    assert found[1]['gmacs'] == found[0]['gmacs'] > 1.5 * found[2]['gmacs']
    assert found[1]['metrics'] == pytest.approx(found[0]['metrics'], abs=1e-3)
    assert all(row['latency_ms'] > 0 for row in found)
    assert (out / 'sweep.png').stat().st_size > 5000
    status, said = call(*arguments[:4], '--sweep', '--target-gmacs', '1')
    assert status != 0 and 'without --target-gmacs' in said
    status, said = call(*arguments[:-1], 'eliminate', '--resume')
    assert status != 0 and 'other settings' in said
    status, said = call(*arguments, '--resume')
    assert status == 0 and 'converting' not in said
    loaded['state_dict']['backbone.stages.0.blocks.0.ffn.layers.1.bias'] += 1
    torch.save(loaded, checkpoint)
    status, said = call(*arguments, '--resume')
    assert status != 0 and 'other settings' in said
    # A model without a detection has no average precision.
    found[2]['metrics'].clear()
    result = dict(config=config, rows=found, size=(160, 160), machine='', out=str(out))
    plot_sweep(result, str(out / 'none.png'))
    assert 'nan' in sweep_text(result)


@pytest.mark.slow
def test_trains_on_in_mmdetections_own_tool(in_digits):
    mmdet = pytest.importorskip('mmdet')
    tool = Path(mmdet.__file__).parent / '.mim' / 'tools' / 'train.py'
    if not tool.exists():
        pytest.skip('MMDetection was installed without its tools')
    config, checkpoint = trained('retinanet', in_digits)
    out = in_digits / 'idle.pth'
    convert_checkpoint(config, checkpoint, str(out), num_images=2, select='score')
    path = os.pathsep.join(
        [str(Path(repa_mm.__file__).parents[1]), os.environ.get('PYTHONPATH', '')]
    )
    done = subprocess.run(
        [sys.executable, str(tool), str(in_digits / 'idle.py'), '--work-dir', str(in_digits / 'w'),
         '--cfg-options', 'train_cfg.max_epochs=1', 'train_dataloader.batch_size=4'],
        env=dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS='1'), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    weights = torch.load(in_digits / 'w' / 'epoch_1.pth', weights_only=False)['state_dict']
    start = torch.load(out, weights_only=False)['state_dict']
    assert weights.keys() == start.keys()
    key = 'backbone.stages.0.blocks.0.ffn.fc2.weight'
    assert 0 < (weights[key] - start[key]).abs().max() < 0.1
