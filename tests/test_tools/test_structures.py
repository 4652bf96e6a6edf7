"""Every structure in the tools, by a thin config each."""

import pytest
import torch

import repa_mm
from repa_mm.config import load_config
from tests.conftest import random_model

# On the tiny detector of the demo: its backbone, and how wide the maps are that it gives the neck.
STRUCTURES = dict(
    idle=(
        "_delete_=True, type='RePaVisionTransformer', idle_ratio=0.5, "
        'arch=dict(embed_dims=16, num_layers=3, num_heads=2, feedforward_channels=32), '
        "img_size=96, patch_size=16, out_indices=[0, 1, 2], out_type='featmap'",
        [16] * 3,
        '',
    )
)


@pytest.fixture(params=STRUCTURES)
def config(request, tmp_path):
    return write_config(tmp_path / f'{request.param}.py', *STRUCTURES[request.param])


def write_config(path, backbone, widths, hooks, *imports):
    """Write a config of the demo's detector with another backbone; projects test theirs with it."""
    pytest.importorskip('mmdet')
    path.write_text(
        f'_base_ = {repa_mm.config_path("demo/retinanet_swin_digits.py")!r}\n'
        f'model = dict(backbone=dict({backbone}),\n'
        f'             neck=dict(in_channels={widths}, out_channels=32),\n'
        '             bbox_head=dict(in_channels=32, feat_channels=32))\n'
        f'custom_imports = dict(imports={["repa_mm", *imports]}, allow_failed_imports=False)\n'
        f'custom_hooks = [{hooks}]\n'
        "default_hooks = dict(reparameterize=dict(type='ReparameterizeHook'))\n"
        'train_dataloader = dict(batch_size=4, num_workers=0, persistent_workers=False)\n'
        'train_cfg = dict(max_epochs=1, val_interval=1)\n'
    )
    return str(path)


def test_trained_tested_and_merged(config, in_digits, call):
    out, merged = in_digits / 'work', in_digits / 'merged.pth'

    def done(tool, *arguments):
        status, said = call(tool, config, *arguments)
        assert status == 0, said

    done('train', '--work-dir', out)
    done('test', out / 'epoch_1.pth', '--work-dir', out)
    done('reparameterize', out / 'epoch_1.pth', merged)
    done('test', merged, '--work-dir', out)
    # A wrong form is refused.
    assert call('reparameterize', config, merged, in_digits / 'twice.pth')[0]
    again = ('--work-dir', out / 'again', '--cfg-options', f'load_from={merged}')
    assert call('train', config, *again)[0]


def test_merging_before_the_end_is_refused(config, tmp_path, call):
    model = random_model(load_config(config))
    scheduled = [module for module in model.modules() if hasattr(module, 'set_lam')]
    if not scheduled:
        pytest.skip('nothing is scheduled')
    for module in scheduled:
        module.set_lam(0.5)
    torch.save(dict(meta={}, state_dict=model.state_dict()), tmp_path / 'early.pth')
    status, said = call('reparameterize', config, tmp_path / 'early.pth', tmp_path / 'merged.pth')
    assert status and 'lambda = 0.5' in said
    assert not (tmp_path / 'merged.pth').exists()
