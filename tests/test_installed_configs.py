"""README's lines on every config of the three codebases that has a Swin backbone, as it is."""

import os.path as osp
import re
from glob import glob
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from mmengine.registry import MODELS, init_default_scope

import repa_mm
from repa_mm.engine.channels import check_channels
from repa_mm.paths import config_root
from repa_mm.reparam import ChannelIdleFFN, CheckpointError
from repa_mm.run import init_model, load_config

README = (Path(__file__).parents[1] / 'README.md').read_text()
MASK_RCNN = 'mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py'
# Those of Swin's own folders, without the large ones; the others are slow together.
QUICK = re.compile('(swin|swin_transformer)/[^/]*swin-(t|tiny|s|small)')


def swin_configs():
    """Names of the installed configs, as `mmdet::folder/file.py`."""
    for package in ('mmdet', 'mmseg', 'mmpretrain'):
        spec = find_spec(package)
        if spec is None:
            continue
        root = config_root(osp.dirname(spec.origin))
        for path in sorted(glob(osp.join(root, '**', '*.py'), recursive=True)):
            name = osp.relpath(path, root)
            swin = 'swin' in name or 'SwinTransformer' in Path(path).read_text()
            # Swin v2 normalizes after its FFNs, and SimMIM's pretraining gives the backbone masks.
            if swin and '_base_' not in name and 'swin_transformer_v2' not in name:
                if not name.startswith('simmim/simmim'):
                    marks = () if QUICK.match(name) else pytest.mark.slow
                    yield pytest.param(f'{package}::{name}', id=f'{package}::{name}', marks=marks)


def user_config(folder, base, **backbone):
    """What README says, as a user writes it."""
    (text,) = re.findall(r"```python\n(_base_ = 'mmdet::swin/.*?)```", README, re.DOTALL)
    path = folder / 'user.py'
    path.write_text(text.replace(re.search("'mmdet::[^']*'", text)[0], repr(base)))
    if backbone:
        path.write_text(path.read_text() + f'model["backbone"].update({backbone!r})\n')
    return str(path)


def images_for(backbone):
    """MMPretrain's Swin takes no maps that are smaller than its windows."""
    size = backbone.get('img_size', 64)
    return torch.zeros(1, backbone.get('in_channels', 3), size, size)


@pytest.fixture
def quick_init(monkeypatch):
    """Weights whose values do not matter, but are finite."""

    def zeros(tensor, *args, **kwargs):
        tensor.data.zero_()
        return tensor

    for name in ('kaiming_uniform_', 'uniform_', 'xavier_uniform_', 'trunc_normal_', 'normal_'):
        monkeypatch.setattr(torch.nn.init, name, zeros)


@pytest.mark.parametrize('name', swin_configs())
def test_lines_of_readme(name, tmp_path, quick_init):
    base = repa_mm.config_path(name)
    original = load_config(base)
    cfg = load_config(user_config(tmp_path, base))
    # Nothing else changes: the hooks and imports of the original stay.
    assert cfg.model.backbone.pop('type') == 'IdleChannels'
    assert cfg.model.backbone.backbone == original.model.backbone
    for key in original:
        if key not in ('model', 'default_hooks', 'custom_imports'):
            assert cfg[key] == original[key], key
    assert cfg.default_hooks.pop('reparameterize') == dict(type='ReparameterizeHook')
    assert cfg.default_hooks == original.default_hooks

    vanilla = MODELS.build(original.model.backbone)
    idle = MODELS.build(dict(type='IdleChannels', **cfg.model.backbone))
    num_ffns = sum(isinstance(m, ChannelIdleFFN) for m in idle.modules())
    assert num_ffns == sum(len(stage.blocks) for stage in vanilla.stages)
    images = images_for(original.model.backbone)
    # The codebases' own return None.
    vanilla.eval(), idle.eval()
    with torch.no_grad():
        outputs = [model(images) for model in (vanilla, idle)]
        shapes = [[tuple(y.shape) for y in out] for out in outputs]
        assert shapes[0] == shapes[1]
        if original.model.get('neck'):
            assert MODELS.build(cfg.model.neck)(outputs[1])


@pytest.mark.slow
@pytest.mark.parametrize('name', swin_configs())
def test_whole_model(name, tmp_path, quick_init):
    cfg = load_config(user_config(tmp_path, repa_mm.config_path(name)))
    if cfg.model.get('language_model'):
        pytest.skip('the language model is downloaded')
    model = MODELS.build(cfg.model).eval()
    check_channels(model)
    with torch.no_grad():
        images = images_for(cfg.model.backbone.backbone)
        assert all(torch.is_tensor(x) for x in model.extract_feat(images))
    with torch.inference_mode():
        deployed = repa_mm.reparameterize(model)
        assert all(torch.is_tensor(x) for x in deployed.extract_feat(images))


def test_whole_detector_from_the_installed_package(tmp_path):
    pytest.importorskip('mmdet')
    from mmdet.structures import DetDataSample

    model = init_model(user_config(tmp_path, MASK_RCNN))
    size = dict(img_shape=(64, 96), ori_shape=(64, 96), scale_factor=(1.0, 1.0))
    data = dict(inputs=[torch.zeros(3, 64, 96)], data_samples=[DetDataSample(metainfo=size)])
    for form in (model, repa_mm.reparameterize(model)):
        (sample,) = form.test_step(data)
        assert sample.pred_instances.bboxes.shape[1] == 4


def test_neck_that_takes_other_channels(tmp_path):
    pytest.importorskip('mmdet')
    config = user_config(tmp_path, MASK_RCNN)
    for more, outputs in (
        ('["backbone"].update(out_indices=(1, 2, 3))', r'\[192, 384, 768\]'),
        (
            '["backbone"].update(embed_dims=128, num_heads=(4, 8, 16, 32))',
            r'\[128, 256, 512, 1024\]',
        ),
    ):
        Path(config).write_text(
            Path(user_config(tmp_path, MASK_RCNN)).read_text()
            + '_backbone = dict(_base_.model.backbone)\nmodel["backbone"]["backbone"] = _backbone\n'
            + more.replace('["backbone"]', '_backbone')
        )
        with pytest.raises(
            ValueError, match=rf'puts out {outputs}.* FPN takes \[96, 192, 384, 768\]'
        ):
            init_model(config)


def test_decode_head_that_takes_other_channels(tmp_path):
    pytest.importorskip('mmseg')
    cfg = load_config(repa_mm.config_path('upernet_repa_swin_t.py'))
    cfg.model.auxiliary_head.in_channels = 192
    with pytest.raises(ValueError, match=r'puts out \[96, .*FCNHead takes \[192\].*auxiliary_head'):
        init_model(cfg)


def test_vanilla_weights(tmp_path):
    """Those of the original are named and not used; given as ours, they are refused."""
    pytest.importorskip('mmdet')
    init_default_scope('mmdet')
    swin = dict(type='SwinTransformer', embed_dims=16, depths=(1, 1), num_heads=(1, 1),
                strides=(4, 2), out_indices=(0, 1))  # fmt: skip
    vanilla = MODELS.build(swin).state_dict()
    checkpoint = str(tmp_path / 'vanilla.pth')
    torch.save(dict(state_dict={f'backbone.{k}': v for k, v in vanilla.items()}), checkpoint)
    for init_cfg, message in (
        (dict(type='Pretrained', checkpoint=checkpoint), 'no stages.*prefix='),
        (dict(type='Pretrained', checkpoint=checkpoint, prefix='backbone.'), 'vanilla backbone'),
        (dict(type='Pretrained', checkpoint=checkpoint, prefix='neck.'), 'neck. is not in'),
    ):
        model = MODELS.build(dict(type='IdleChannels', backbone=swin, init_cfg=init_cfg))
        with pytest.raises(CheckpointError, match=f'vanilla.pth.*{message}.*convert_pretrained.py'):
            model.init_weights()
