from functools import cache, partial
from pathlib import Path

import pytest
import torch

import repa_mm
from repa_mm.apis import open_model
from repa_mm.io.configs import load_config
from repa_mm.io.files import write_bytes
from tests.conftest import _randomize, random_model

# Very small models on the demo's.
HEADS = dict(
    retinanet='neck=dict(in_channels=[48, 96, 192], out_channels=32), '
    'bbox_head=dict(in_channels=32, feat_channels=32, stacked_convs=2)',
    mask_rcnn='neck=dict(in_channels=[24, 48, 96, 192], out_channels=32), '
    'rpn_head=dict(in_channels=32, feat_channels=32), '
    'roi_head=dict(bbox_roi_extractor=dict(out_channels=32), '
    'bbox_head=dict(in_channels=32, fc_out_channels=32), '
    'mask_roi_extractor=dict(out_channels=32), '
    'mask_head=dict(in_channels=32, conv_out_channels=32)), '
    'test_cfg=dict(rpn=dict(nms_pre=200, max_per_img=60), rcnn=dict(score_thr=0.02))',
    upernet='decode_head=dict(in_channels=[24, 48, 96, 192], channels=16), '
    'auxiliary_head=dict(in_channels=96, channels=16)',
    classifier='head=dict(num_classes=7, in_channels=192)',
)
HEADS['slide'] = (
    f"{HEADS['upernet']}, test_cfg=dict(mode='slide', crop_size=(96, 96), stride=(64, 64))"
)
# With a ResNet instead, whose graph has few nodes.
RESNET = dict(type='ResNet', depth=18, base_channels=8, stem_channels=8)
PLAIN = dict(
    retinanet={'neck.in_channels': [16, 32, 64]},
    mask_rcnn={'neck.in_channels': [8, 16, 32, 64]},
    upernet={'decode_head.in_channels': [8, 16, 32, 64], 'auxiliary_head': None},
    classifier={'head.in_channels': 64, 'train_cfg': None},
)


def without_bias_correction(monkeypatch):
    """Let NNCF leave out the step for which it compiles every layer apart."""
    import nncf

    parameters = partial(nncf.AdvancedQuantizationParameters, disable_bias_correction=True)
    monkeypatch.setattr(nncf, 'AdvancedQuantizationParameters', parameters)


def write_config(task, folder, repa=True):
    """The path of a config of a very small model."""
    kind = 'repa_swin' if repa else 'swin'
    of_demo = 'upernet' if task == 'slide' else task
    base = f'{kind}_t_in1k.py' if task == 'classifier' else f'demo/{of_demo}_{kind}_digits.py'
    path = folder / f'{task}_{kind}.py'
    path.write_text(
        f'_base_ = {repa_mm.config_path(base)!r}\n'
        'model = dict(backbone=dict(arch=dict(_delete_=True, embed_dims=24, depths=[1, 1, 1, 1], '
        f'num_heads=[1, 2, 2, 2])), {HEADS[task]})\n'
    )
    return str(path)


@pytest.fixture
def plain(tmp_path):
    """A function: a very small stock model without a transformer."""

    def build(task, **options):
        cfg = load_config(write_config(task, tmp_path, repa=False))
        cfg.model.backbone = dict(RESNET, out_indices=cfg.model.backbone.get('out_indices', (3,)))
        for changes in (PLAIN[task], options):
            cfg.merge_from_dict({f'model.{key}': x for key, x in changes.items()})
        model = _randomize(random_model(cfg))
        # With random statistics, features of a deep ResNet hardly depend on the image.
        parts = [*filter(None, (model.backbone, getattr(model, 'decode_head', None)))]
        for norm in (m for part in parts for m in part.modules() if hasattr(m, 'running_mean')):
            norm.train().momentum = 1.0
        coarse = torch.randn(4, model.backbone.conv1.in_channels, 12, 16)
        with torch.no_grad():
            found = coarse.repeat_interleave(8, 2).repeat_interleave(8, 3)
            for part in parts:
                found = part(found)
        model.eval()
        return model

    return build


def program_of(name):
    """A program of docs/deploy.md, by the comment above it."""
    docs = (Path(__file__).parents[2] / 'docs' / 'deploy.md').read_text()
    return docs.split(f'<!-- {name} -->')[1].split('```python\n')[1].split('```')[0]


@pytest.fixture(scope='session')
def built(tmp_path_factory):
    """A function: config, checkpoint and model in its training form, made once."""
    folder = tmp_path_factory.mktemp('built')

    @cache
    def get(task):
        config = write_config(task, folder)
        torch.manual_seed(0)
        model = _randomize(random_model(load_config(config)))
        checkpoint = str(folder / f'{task}.pth')
        torch.save(dict(state_dict=model.state_dict()), checkpoint)
        return config, checkpoint, model

    return get


@pytest.fixture(scope='session')
def exported(built, tmp_path_factory):
    """A function: what `built` makes and the file of its deploy form, made once."""
    from repa_mm.export import agreeing_onnx, noise

    folder = tmp_path_factory.mktemp('exported')

    @cache
    def get(task):
        config, checkpoint, model = built(task)
        deployed, file = open_model(config, checkpoint, merge=True), str(folder / f'{task}.onnx')
        content, error = agreeing_onnx(deployed, noise(deployed.cfg))
        assert error <= 0.02
        write_bytes(file, content)
        return config, checkpoint, model, file

    return get
