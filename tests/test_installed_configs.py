"""The docs' lines on every config of the three codebases that has a Swin backbone, as it is."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

import repa_mm
from repa_mm.io.paths import config_root
from repa_mm.reparam import ChannelIdleFFN
from tests.shared import check_norms_decay_alike

ROOT = Path(__file__).parents[1]
DOCS = (ROOT / 'docs' / 'structures.md').read_text()
README = (ROOT / 'README.md').read_text()
# The smallest ones of Swin's own folders; the others are slow together.
QUICK = re.compile('(swin|swin_transformer)/[^/]*swin-(t|tiny)|mask2former/.*swin-t.*(50e|ade20k)')


def swin_configs():
    """Names of the installed configs, as `mmdet::folder/file.py`."""
    for package in ('mmdet', 'mmseg', 'mmpretrain'):
        root = Path(config_root(package))
        for path in sorted(root.rglob('*.py')):
            name = path.relative_to(root).as_posix()
            swin = 'swin' in name or 'SwinTransformer' in path.read_text()
            # Swin V2 normalizes after its FFNs, and SimMIM's pretraining gives it masks.
            if swin and not re.search('_base_|swin_transformer_v2|^simmim/simmim', name):
                marks = () if QUICK.match(name) else pytest.mark.slow
                yield pytest.param(path, id=f'{package}::{name}', marks=marks)


def lines_of(page):
    """The config that a page shows."""
    (text,) = re.findall(r"```python\n(_base_ = 'mmdet::swin/.*?)```", page, re.DOTALL)
    return text


def user_config(folder, base):
    """What docs/structures.md says, as a user writes it, with the codebase as the default scope."""
    path, text = folder / 'user.py', lines_of(DOCS)
    keys = Config.fromfile(base).get('optim_wrapper', {}).get('paramwise_cfg', {})
    named = [v for k, v in keys.get('custom_keys', {}).items() if 'blocks.0.norm' in k]
    if named:
        (more,) = re.findall(r'<!-- norms -->\n```python\n(.*?)```', DOCS, re.DOTALL)
        text += more.replace('dict(lr_mult=0.1, decay_mult=0.0)', repr(dict(named[0])))
    path.write_text(re.sub("'mmdet::[^']*'", repr(str(base)), text))
    cfg = Config.fromfile(path)
    init_default_scope(cfg.default_scope)
    return cfg


@pytest.mark.parametrize('path', list(swin_configs()))
def test_lines_of_the_docs(path, tmp_path, quick_init):
    original, cfg = Config.fromfile(path), user_config(tmp_path, path)
    # Nothing else changes: the hooks and imports of the original stay.
    for key in set(original) - {'model', 'default_hooks', 'custom_imports', 'optim_wrapper'}:
        assert cfg[key] == original[key], key
    assert cfg.default_hooks.pop('reparameterize') == dict(type='ReparameterizeHook')
    assert cfg.default_hooks == original.default_hooks

    swin = original.model.backbone
    vanilla, idle = MODELS.build(swin), MODELS.build(cfg.model.backbone)
    num_ffns = sum(isinstance(m, ChannelIdleFFN) for m in idle.modules())
    assert num_ffns == sum(len(stage.blocks) for stage in vanilla.stages)
    if 'optim_wrapper' in cfg and 'constructor' not in cfg.optim_wrapper:
        check_norms_decay_alike(nn.ModuleDict(dict(backbone=idle)), cfg.optim_wrapper)
    # MMPretrain's Swin takes no maps that are smaller than its windows.
    size = swin.get('img_size', 64)
    images = torch.zeros(1, swin.get('in_channels', 3), size, size)
    vanilla.eval(), idle.eval()  # the codebases' own return None
    with torch.no_grad():
        expected, found = vanilla(images), idle(images)
        assert [y.shape for y in found] == [y.shape for y in expected]
        if original.model.get('neck'):
            assert MODELS.build(cfg.model.neck)(found)


def test_six_lines_of_readme(tmp_path, quick_init):
    assert len(lines_of(README).strip().splitlines()) == 6
    (tmp_path / 'user.py').write_text(lines_of(README))
    paths = tmp_path / 'user.py', ROOT / 'configs/mask_rcnn_repa_swin_t.py'
    cfg, ours = map(Config.fromfile, paths)
    init_default_scope(cfg.default_scope)
    assert cfg.default_hooks.reparameterize.type == 'ReparameterizeHook'
    assert cfg.model.backbone.init_cfg.checkpoint == ours.model.backbone.init_cfg.checkpoint
    model, expected = MODELS.build(cfg.model), MODELS.build(ours.model)
    assert model.backbone.norm_eval
    check_norms_decay_alike(model, cfg.optim_wrapper)
    shapes, others = ({k: v.shape for k, v in m.state_dict().items()} for m in (model, expected))
    assert shapes == others
    rates, others = (
        [x.drop_prob for x in m.modules() if hasattr(x, 'drop_prob')] for m in (model, expected)
    )
    assert rates == others and max(rates) > 0.19


@pytest.mark.slow
@pytest.mark.parametrize('path', list(swin_configs()))
def test_whole_model(path, tmp_path, quick_init):
    cfg = user_config(tmp_path, path)
    if cfg.model.get('language_model'):
        pytest.skip('the language model is downloaded')
    model = repa_mm.reparameterize(MODELS.build(cfg.model).eval())
    swin = cfg.model.backbone.model
    size = swin.get('img_size', 64)
    with torch.no_grad():
        maps = model.extract_feat(torch.zeros(1, swin.get('in_channels', 3), size, size))
    assert all(torch.is_tensor(x) for x in maps)
