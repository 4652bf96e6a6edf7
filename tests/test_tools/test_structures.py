"""Every structure in every tool, by a thin config each."""

import json

import pytest
import torch

import repa_mm
from repa_mm.reparam import Scheduled

# On the tiny detector of the demo: its backbone, and how wide the maps are that it gives the neck.
VIT = (
    'arch=dict(embed_dims=16, num_layers=3, num_heads=2, feedforward_channels=32), '
    "img_size=96, patch_size=16, out_indices=[0, 1, 2], out_type='featmap'"
)
STRUCTURES = dict(
    parallel=("type='ParallelSwinTransformer', num_branches=2", [48, 96, 192]),
    progressive=("type='ProgressiveSwinTransformer'", [48, 96, 192]),
    progressive_idle=(
        "type='ProgressiveSwinTransformer', idle_ratio=0.75, progressive_activations=True",
        [48, 96, 192],
    ),
    experts=(f"_delete_=True, type='ExpertsVisionTransformer', num_experts=2, {VIT}", [16] * 3),
    experts_idle=(
        f"_delete_=True, type='ExpertsVisionTransformer', num_experts=2, idle_ratio=0.5, {VIT}",
        [16] * 3,
    ),
    mixers=(
        "_delete_=True, type='AffineRIFormer', out_indices=[2, 4, 6], "
        'arch=dict(layers=[1, 1, 1, 1], embed_dims=[8, 16, 24, 32])',
        [16, 24, 32],
    ),
)
HOOKS = dict(
    parallel="dict(type='ScheduleHook', warmup=1), ",
    progressive="dict(type='ScheduleHook', warmup=1), ",
    progressive_idle="dict(type='ScheduleHook', warmup=1), ",
    experts="dict(type='AverageExpertsHook'), ",
    experts_idle="dict(type='AverageExpertsHook'), ",
    mixers='',
)
ARCH = 'arch=dict(embed_dims=24, depths=[2, 2, 2, 2], num_heads=[1, 2, 2, 2]), window_size=3'


def config_of(name, folder):
    backbone, widths = STRUCTURES[name]
    if 'arch' not in backbone:
        backbone = f'{backbone}, {ARCH}'
    path = folder / f'{name}.py'
    path.write_text(
        f'_base_ = {repa_mm.config_path("demo/retinanet_swin_digits.py")!r}\n'
        f'model = dict(backbone=dict({backbone}),\n'
        f'             neck=dict(in_channels={widths}, out_channels=32),\n'
        '             bbox_head=dict(in_channels=32, feat_channels=32))\n'
        f"custom_hooks = [{HOOKS[name]}dict(type='ReparameterizeHook')]\n"
        'train_dataloader = dict(batch_size=4, num_workers=0, persistent_workers=False)\n'
        'train_cfg = dict(max_epochs=1, val_interval=1)\n'
    )
    return str(path)


@pytest.mark.parametrize(
    'name',
    [
        'progressive_idle',
        *(pytest.param(n, marks=pytest.mark.slow) for n in STRUCTURES if n != 'progressive_idle'),
    ],
)
def test_every_tool_takes_the_structure(name, in_digits, call):
    pytest.importorskip('mmdet')
    config, out = config_of(name, in_digits), in_digits / 'work'

    def done(tool, *arguments):
        status, said = call(tool, *arguments)
        assert status == 0, said

    done('train', config, '--work-dir', out)
    checkpoint, merged = out / 'epoch_1.pth', in_digits / 'merged.pth'
    assert torch.load(checkpoint, weights_only=False)['meta']['iter'] == 2
    done('test', config, checkpoint, '--work-dir', out)
    done('reparameterize', config, checkpoint, merged)
    done('test', config, merged, '--work-dir', out)
    # A wrong form is refused.
    for tool, arguments in (
        ('reparameterize', (merged, in_digits / 'twice.pth')),
        ('train', ('--work-dir', out / 'again', '--cfg-options', f'load_from={merged}')),
    ):
        status, said = call(tool, config, *arguments)
        assert status != 0 and 'reparameterized' in said
    counted, timed = in_digits / 'counted.json', in_digits / 'timed.json'
    done('get_flops', config, '--part', 'backbone', '--shape', 96, 96, '--out', counted)
    forms = json.loads(counted.read_text())['forms']
    for kind in ('parameters', 'macs'):
        training, deploy = (forms[form][kind][''] for form in ('training', 'deploy'))
        # Experts cost parameters, and no multiply-adds; norms are no multiply-adds of weights.
        assert deploy < training or kind == 'macs' and deploy == training
    done('export', config, checkpoint, in_digits / 'backbone.pt', '--shape', 96, 96)
    done(
        *('benchmark', config, merged, '--synthetic', '96x96', '--num-images', 1, '--warmup', 0),
        *('--no-memory', '--out', timed),
    )
    assert timed.is_file()


@pytest.mark.parametrize('name', ['parallel', 'progressive', 'progressive_idle'])
def test_merging_before_the_end_is_refused(name, in_digits, call):
    pytest.importorskip('mmdet')
    from repa_mm.run import init_model

    config = config_of(name, in_digits)
    model = init_model(config)
    for module in model.modules():
        if isinstance(module, Scheduled):
            module.set_lam(0.5)
    torch.save(dict(meta={}, state_dict=model.state_dict()), in_digits / 'early.pth')
    status, said = call('reparameterize', config, in_digits / 'early.pth', in_digits / 'merged.pth')
    assert (
        status != 0 and 'lambda = 0.5' in said and 'train on until the schedule has ended' in said
    )
    assert not (in_digits / 'merged.pth').exists()
