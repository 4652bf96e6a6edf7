"""Features of backbones, and their nearest neighbours."""

import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.registry import MODELS
from sklearn.neighbors import KNeighborsClassifier

from projects.dino.knn import image_features, knn_evaluate, knn_predict
from repa_mm.io.configs import load_config
from tests.conftest import random_model

BACKBONE = dict(
    type='RePaVisionTransformer',
    arch=dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=64),
    img_size=32,
    patch_size=8,
    out_type='cls_token',
)


@pytest.mark.parametrize('temperature', [0.07, 1.0])
def test_votes_are_those_of_scikit_learn(temperature):
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(6, 12))
    labels, truth = rng.integers(0, 6, 300), rng.integers(0, 6, 100)
    gallery = centers[labels] + 1.5 * rng.normal(size=(300, 12))
    queries = centers[truth] + 1.5 * rng.normal(size=(100, 12))
    found = knn_predict(
        *map(torch.from_numpy, (gallery, labels, queries)), (1, 10, 200), temperature, chunk=33
    )
    for k, predicted in found.items():
        reference = KNeighborsClassifier(
            k, metric='cosine', weights=lambda d: np.exp((1 - d) / temperature)
        ).fit(gallery, labels)
        np.testing.assert_array_equal(predicted.numpy(), reference.predict(queries))


def test_small_temperature_does_not_overflow():
    x = torch.eye(3)
    assert knn_predict(x, torch.arange(3), x, (3,), 1e-3)[3].tolist() == [0, 1, 2]


@pytest.fixture
def folder(tmp_path):
    """Images of three colours, each a class."""
    rng = np.random.default_rng(0)
    for split, count in (('train', 8), ('val', 4)):
        for index, name in enumerate(('blue', 'green', 'red')):
            path = tmp_path / 'data' / split / name
            path.mkdir(parents=True)
            for i in range(count):
                image = rng.integers(0, 60, (40, 40, 3), np.uint8)
                image[..., index] += 180
                cv2.imwrite(str(path / f'{i}.png'), image)
    return str(tmp_path / 'data')


CONFIG = """
default_scope = 'mmpretrain'
custom_imports = dict(imports=['repa_mm'])
model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(mean=[127] * 3, std=[60] * 3, to_rgb=True),
    backbone={backbone},
    head=dict(type='LinearClsHead', num_classes=3, in_channels=16),
)
pipeline = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=32), dict(type='PackInputs')]
train_dataloader = dict(
    dataset=dict(type='CustomDataset', data_root={root!r}, data_prefix='train', pipeline=[])
)
test_dataloader = dict(
    dataset=dict(type='CustomDataset', data_root={root!r}, data_prefix='val', pipeline=pipeline)
)
test_evaluator = dict(type='Accuracy')
"""


@pytest.fixture
def config(tmp_path, folder):
    path = tmp_path / 'config.py'
    path.write_text(CONFIG.format(backbone=BACKBONE, root=folder))
    return str(path)


@pytest.mark.parametrize('where', ['model', 'top'])
def test_accuracy_is_that_of_scikit_learn_on_the_same_features(config, folder, where, randomize):
    """Features of normalized images, wherever the config says how to normalize them."""
    if where == 'top':  # as MMPretrain's own configs
        line = next(x for x in CONFIG.splitlines(True) if 'data_preprocessor' in x)
        text = Path(config).read_text().replace(line, '')
        Path(config).write_text(text + line.strip().rstrip(',') + '\n')
    torch.manual_seed(0)
    model = randomize(random_model(load_config(config)))
    path = str(Path(folder).parent / 'model.pth')
    torch.save(dict(state_dict=model.state_dict()), path)
    data = {}
    for split in ('train', 'val'):
        files = sorted((Path(folder) / split).rglob('*.png'))
        images = [cv2.resize(cv2.imread(str(f)), (32, 32)) for f in files]
        images = torch.from_numpy(np.stack(images)[..., ::-1].copy()).permute(0, 3, 1, 2)
        with torch.no_grad():
            features = model.backbone((images.float() - 127) / 60)[-1].numpy()
        data[split] = features, [f.parent.name for f in files]
    found = knn_evaluate(config, path, (1, 5, 10))
    assert found[5] > 50  # colours are told apart by random features
    for k, accuracy in found.items():
        reference = KNeighborsClassifier(
            k, metric='cosine', weights=lambda d: np.exp((1 - d) / 0.07)
        ).fit(*data['train'])
        assert accuracy == pytest.approx(100 * reference.score(*data['val']))


def test_classes_of_both_splits_are_the_same(folder, config):
    shutil.rmtree(Path(folder) / 'val' / 'green')
    for data in (None, folder):
        with pytest.raises(ValueError, match="classes .* differ: .'green'"):
            knn_evaluate(config, None, k=(1,), data=data)


def test_a_vanilla_model_on_a_folder(config, folder):
    text = Path(config).read_text().replace('RePaVisionTransformer', 'VisionTransformer')
    Path(config).write_text(text)
    assert knn_evaluate(config, k=(3,), data=folder)[3] > 50


VIT = dict(
    BACKBONE, type='VisionTransformer', out_type='raw', final_norm=False, with_cls_token=False
)
MIXER = dict(
    type='RePaMlpMixer',
    arch=dict(embed_dims=16, num_layers=1, tokens_mlp_dims=8, channels_mlp_dims=32),
    img_size=32,
    patch_size=8,
)
POOL = dict(type='GlobalAveragePooling', dim=1)


class Transposed(torch.nn.Module):
    """Pools tokens (N, L, C), as MMPretrain's pools (N, C, L)."""

    def forward(self, x):
        return tuple(y.mean(1) for y in x)


@pytest.mark.parametrize(
    'backbone, neck, expected',
    [
        (BACKBONE, None, lambda x: x),
        (dict(BACKBONE, out_type='raw'), None, lambda x: x[:, 0]),
        (dict(BACKBONE, out_type='featmap'), None, lambda x: x.mean((2, 3))),
        (MIXER, POOL, lambda x: x.mean(2)),
        (VIT, Transposed, lambda x: x.mean(1)),
        (VIT, None, None),
        (MIXER, None, None),
    ],
)
def test_one_vector_of_the_backbone_s_outputs(backbone, neck, expected, randomize):
    model = torch.nn.Module()
    model.backbone = randomize(MODELS.build(dict(backbone, _scope_='mmpretrain')))
    model.eval()
    if neck is not None:
        model.neck = MODELS.build(dict(neck, _scope_='mmpretrain')) if neck is POOL else neck()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        if expected is None:
            with pytest.raises(ValueError, match='no neck that pools'):
                image_features(model, images)
            return
        found = image_features(model, images)
        torch.testing.assert_close(found, expected(model.backbone(images)[-1]))
    assert found.shape == (2, 16)
