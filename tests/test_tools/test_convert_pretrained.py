"""A trained vanilla model becomes one with channel-idle FFNs, by the tool and its files."""

import os
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS

import repa_mm
from repa_mm.models.surgery.pretrained import ConversionReport
from repa_mm.reparam import has_training_form
from repa_mm.runtime import (
    init_model,
    load_config,
    reparameterize_checkpoint,
    runner_for_testing,
    runner_for_training,
)
from repa_mm.runtime.pretrained import convert_checkpoint

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
    result = convert_checkpoint(config, checkpoint, str(out), 0.5, norm, num_images=6)
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
    )  # fmt: skip
    cfg = Config.fromfile(result['config'])
    assert cfg.custom_imports.imports == ['json', 'repa_mm']
    assert [h.type for h in cfg.custom_hooks] == ['NumClassCheckHook', 'ReparameterizeHook']
    assert cfg.model.backbone.idle_ratio == [0.9, 0.5] * 5
    # Both folders move together.
    os.rename(in_digits / 'elsewhere', in_digits / 'moved')
    os.rename(in_digits / 'mine', in_digits / 'elsewhere')
    os.rename(in_digits / 'elsewhere', in_digits / 'mine')
    init_model(str(in_digits / 'moved' / 'idle.py'), str(in_digits / 'moved' / 'idle.pth'))


def test_bad_input_leaves_nothing(in_digits, call):
    config, checkpoint = trained('retinanet', in_digits)
    out = in_digits / 'out' / 'idle.pth'
    empty = in_digits / 'empty'
    empty.mkdir()
    nan = torch.load(checkpoint, weights_only=False)
    nan['state_dict']['backbone.stages.1.blocks.0.ffn.layers.1.bias'][0] = float('nan')
    torch.save(nan, in_digits / 'nan.pth')
    idle = repa_mm.config_path('demo/retinanet_repa_swin_digits.py')
    for arguments, message in (
        ((config, checkpoint, out, '--images', empty), 'no image to calibrate on'),
        ((config, checkpoint, out, '--images', in_digits / 'none'), 'no folder of images'),
        ((config, checkpoint, out, '--num-images', 0), '0 images'),
        ((config, checkpoint, out, '--idle-ratio', 1.5), 'from 0'),
        ((config, checkpoint, out, '--idle-ratio', 0.5, 0.5), '10 blocks'),
        ((config, in_digits / 'nan.pth', out), 'ffn.layers.1.bias'),
        ((config, checkpoint, checkpoint), 'is the input'),
        ((config, checkpoint, out.with_suffix('.py')), 'name it'),
        ((idle, checkpoint, out), 'vanilla'),
        ((repa_mm.config_path('demo/upernet_swin_digits.py'), checkpoint, out), 'another model'),
    ):
        status, said = call('convert_pretrained', *map(str, arguments))
        assert status != 0 and message in said and 'Traceback' not in said, said
        assert not out.exists() and not Path(out).with_suffix('.py').exists()
