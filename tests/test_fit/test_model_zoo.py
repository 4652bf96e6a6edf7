"""Every config in the table of docs/convert.md converts, with random weights in its layout."""

import re
from importlib.util import find_spec
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.registry import MODELS

import repa_mm
from repa_mm.fit.pretrained import convert_checkpoint
from repa_mm.reparam import ChannelIdleFFN
from repa_mm.run import load_config

DOCS = Path(__file__).parents[1] / 'docs' / 'convert.md'
ROWS = re.findall(r'^\| `(\w+::\S+)` \| \[(\S+)\]\((\S+)\) \|$', DOCS.read_text(), re.M)
QUICK = 'mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py'


def test_the_table_names_installed_configs():
    assert len(ROWS) > 40
    for config, name, url in ROWS:
        assert url.startswith('https://') and url.endswith(name) and name.endswith('.pth')
        if find_spec(config.partition('::')[0]):
            assert Path(repa_mm.config_path(config)).is_file()
    for package, last in (('mmdet', 'mmdet::swin/'), ('mmseg', 'mmseg::swin/')):
        assert sum(config.startswith(last) for config, *_ in ROWS) >= 4, package


@pytest.mark.parametrize('package', ['mmdet', 'mmseg', 'mmpretrain'])
def test_the_addresses_are_those_of_the_metafiles(package):
    """Up to the host: OneDL's packages name a mirror."""
    if find_spec(package) is None:
        pytest.skip('not installed')
    files = Path(find_spec(package).origin).parent.glob('.mim/configs/**/metafile.y*ml')
    known = ''.join(file.read_text() for file in files)
    if not known:
        pytest.skip('installed without its configs')
    for config, _, url in ROWS:
        if config.startswith(f'{package}::'):
            assert f'/{url.split("/", 3)[3]}\n' in known, url


def small_images(steps):
    """A test pipeline whose images are small."""
    for step in steps:
        for key in ('scale', 'crop_size', 'size'):
            if key in step:
                whole = isinstance(step[key], int)
                step[key] = 96 if whole else tuple(96 for _ in step[key])
    return steps


@pytest.mark.parametrize(
    'config',
    [
        pytest.param(config, marks=() if config == QUICK else pytest.mark.slow)
        for config in dict.fromkeys(config for config, *_ in ROWS)
    ],
)
def test_random_weights_convert(config, tmp_path, monkeypatch):
    if find_spec(config.partition('::')[0]) is None:
        pytest.skip('not installed')
    cfg = load_config(config)
    # Weights whose values hardly matter.
    for name in ('kaiming_uniform_', 'xavier_uniform_', 'trunc_normal_'):
        monkeypatch.setattr(torch.nn.init, name, lambda t, *args, **kwargs: t.data.normal_(0, 0.02))
    model = MODELS.build(cfg.model)
    for key, value in model.state_dict().items():
        if key.startswith('backbone.') and value.is_floating_point():
            value.normal_(1 if 'norm' in key and key.endswith('weight') else 0, 0.02)
        elif value.is_floating_point():
            value.nan_to_num_(0, 0, 0)  # some are whatever was in the memory
    checkpoint = tmp_path / 'vanilla.pth'
    torch.save(dict(state_dict=model.state_dict(), meta=dict(epoch=12)), checkpoint)
    folder = tmp_path / 'images'
    folder.mkdir()
    for i in range(2):
        noise = np.random.default_rng(i).integers(0, 256, (96, 128, 3), np.uint8)
        cv2.imwrite(str(folder / f'{i}.png'), noise)
    dataset = cfg.test_dataloader.dataset
    options = {'test_dataloader.dataset.pipeline': small_images(dataset.pipeline)}
    if cfg.model.get('data_preprocessor', {}).get('pad_size_divisor', 1) > 32:
        options['model.data_preprocessor.pad_size_divisor'] = 32
    size = cfg.model.backbone.get('img_size')
    if size and cfg.default_scope == 'mmpretrain':
        options['model.backbone.pad_small_map'] = True
    found = convert_checkpoint(
        config, str(checkpoint), str(tmp_path / 'idle.pth'), 0.75, num_images=1,
        images=str(folder), select='score', ridge=0.1, cfg_options=options,
    )  # fmt: skip
    assert found['macs'][1] < 0.8 * found['macs'][0]
    written = load_config(found['config'])
    assert written.model.backbone.type == 'IdleChannels'
    converted = MODELS.build(written.model)
    weights = torch.load(tmp_path / 'idle.pth')['state_dict']
    missing = converted.load_state_dict(weights)
    assert not missing.missing_keys and not missing.unexpected_keys
    ffns = [m for m in converted.modules() if isinstance(m, ChannelIdleFFN)]
    assert len(ffns) == len(found['report'].blocks)
    for key, value in model.state_dict().items():
        if not key.startswith('backbone.'):
            assert torch.equal(weights[key], value)
    for file in tmp_path.glob('*.pth'):  # all together, tens of gigabytes
        file.unlink()
