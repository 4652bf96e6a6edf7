"""Models and images from configs, checkpoints and folders."""

import json

import pytest
import torch
from mmengine.registry import DATASETS
from mmpretrain.datasets import ImageNet

from repa_mm.apis import open_model
from repa_mm.apis.images import build_images
from repa_mm.io.configs import dataset_config, load_config
from repa_mm.io.paths import config_path
from repa_mm.reparam import CheckpointError, has_deploy_form, has_training_form
from tests.test_io.test_configs import CONFIG


def save(model, path, **meta):
    torch.save(dict(meta=meta, state_dict=model.state_dict()), path)
    return str(path)


def test_a_model_in_the_form_of_its_weights_or_merged(tmp_path, randomize):
    (tmp_path / 'config.py').write_text(CONFIG)
    config = str(tmp_path / 'config.py')
    model = randomize(open_model(config))
    path = save(model, tmp_path / 'training.pth', dataset_meta=dict(classes=('c', 'd')))
    opened, merged = open_model(config, path), open_model(load_config(config), path, merge=True)
    assert has_training_form(opened) and has_deploy_form(merged) and not has_training_form(merged)
    # With the prefix of DistributedDataParallel.
    again = open_model(config, save(torch.nn.DataParallel(merged), tmp_path / 'deploy.pth'))
    assert has_deploy_form(again) and again.dataset_meta == dict(classes=('a', 'b'))
    assert opened.dataset_meta == merged.dataset_meta == dict(classes=('c', 'd'))
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(opened(images), model(images), rtol=0, atol=0)
        for other in (merged, again):
            torch.testing.assert_close(other(images), model(images), rtol=1e-4, atol=1e-5)
    for model in (opened, merged):
        assert not any(m.training for m in model.modules()) and model.cfg.default_scope
    with pytest.raises(CheckpointError):
        open_model(load_config(config, {'model.head.num_classes': 3}), path)


def test_without_a_checkpoint_the_weights_are_initialized():
    config = config_path('demo/retinanet_swin_digits.py')
    missing = dict(type='Pretrained', checkpoint='not/there.pth')
    options = {'model.backbone.init_cfg': missing}
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model = open_model(load_config(config, options))
    other = open_model(load_config(config, {'model.backbone.init_cfg': [missing]}))
    assert torch.equal(before, torch.get_rng_state())
    for a, b in zip(model.parameters(), other.parameters()):
        assert torch.equal(a, b)
    assert float(model.bbox_head.retina_cls.bias.detach().max()) < -4  # hardly any object
    assert len(model.dataset_meta['classes']) == 10


@pytest.mark.parametrize(
    'meta, metainfo, expected',
    [
        (dict(dataset_meta=dict(CLASSES='ef', PALETTE=None)), None, 'ef'),  # early releases
        (dict(CLASSES='ef', epoch=3), None, 'ef'),  # the release before
        (dict(dataset_meta=dict(palette=None)), None, 'ab'),
        (dict(), dict(classes='classes.txt'), 'cd'),
        (dict(), dict(palette=[(1, 2, 3)]), None),  # those of the class, if it has them
    ],
)
def test_names_of_classes_are_those_that_the_codebase_finds(
    meta, metainfo, expected, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'classes.txt').write_text('c\nd')
    (tmp_path / 'config.py').write_text(CONFIG)
    cfg = load_config('config.py')
    path = save(open_model(cfg), tmp_path / 'model.pth', **meta)
    dataset = dataset_config(cfg, 'test')
    if metainfo:
        dataset.metainfo = metainfo
    if expected is None:
        dataset.type, expected = 'ImageNet', ImageNet.METAINFO['classes']
    assert list(open_model(cfg, path).dataset_meta['classes']) == list(expected)


def test_a_model_opens_without_the_files_that_a_data_set_wants_at_once():
    cfg = load_config(config_path('demo/upernet_repa_swin_digits.py'))
    cfg.test_dataloader.dataset = dict(type='PascalVOCDataset', ann_file='none.txt', pipeline=[])
    assert open_model(cfg).dataset_meta['classes'][1] == 'aeroplane'


def test_images_without_objects_count(tmp_path):
    images = [dict(id=i, file_name=f'{i}.png', height=64, width=64) for i in range(3)]
    box = dict(id=1, image_id=1, category_id=1, bbox=[2, 2, 40, 40], area=1600, iscrowd=0)
    categories = [dict(id=1, name='zero')]
    (tmp_path / 'found.json').write_text(
        json.dumps(dict(images=images, annotations=[box], categories=categories))
    )
    cfg = load_config(config_path('demo/retinanet_swin_digits.py'))
    files = dict(data_root=str(tmp_path), ann_file='found.json', metainfo=dict(classes=('zero',)))
    cfg.train_dataloader.dataset.update(files)
    assert len(DATASETS.build(cfg.train_dataloader.dataset)) == 1
    dataset = build_images(cfg, 'train')
    assert [dataset.get_data_info(i)['img_id'] for i in range(len(dataset))] == [0, 1, 2]
    assert dataset.pipeline.transforms[-1].meta_keys == cfg.test_pipeline[-1].meta_keys
