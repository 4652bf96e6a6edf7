"""What projects test their structures in the tools with, by a thin config."""

import torch

import repa_mm
from repa_mm.io.configs import load_config
from tests.conftest import random_model


def write_config(path, backbone, widths, hooks, *imports):
    """Write a config of the demo's detector with another backbone.

    Args:
        backbone (str): What the config says of it.
        widths (list): How wide the maps are that it gives the neck.
        hooks (str): Further hooks.
        imports (str): Modules to import.
    """
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


def train_merge_and_test(config, folder, call):
    """Run the tools in a folder; the merged checkpoint."""
    trained, merged = folder / 'epoch_1.pth', folder / 'merged.pth'
    for command in (
        ('train', config, '--work-dir', folder),
        ('reparameterize', config, trained, merged),
        ('test', config, merged, '--work-dir', folder),
    ):
        assert call(*command) == (0, '')
    return merged


def check_merging_before_the_end_is_refused(config, folder, call):
    model = random_model(load_config(config))
    for module in model.modules():
        if hasattr(module, 'set_lam'):
            module.set_lam(0.5)
    torch.save(dict(meta={}, state_dict=model.state_dict()), folder / 'early.pth')
    status, said = call('reparameterize', config, folder / 'early.pth', folder / 'no.pth')
    assert status and 'lambda = 0.5' in said
    assert not (folder / 'no.pth').exists()
