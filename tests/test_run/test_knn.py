"""Nearest neighbours, attention maps and checkpoints of DINO."""

import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.registry import MODELS
from repa_mm.run.attention import class_attention
from sklearn.neighbors import KNeighborsClassifier

import repa_mm  # noqa: F401, registers
from repa_mm.run.knn import _vector, knn_evaluate, knn_predict

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


@pytest.mark.parametrize(
    'change, message',
    [
        (dict(k=(4,)), 'from 1 to 3'),
        (dict(k=(0,)), 'from 1 to 3'),
        (dict(temperature=0.0), 'temperature'),
        (dict(queries=torch.zeros(0, 3)), 'nothing to compare'),
    ],
)
def test_votes_that_are_refused(change, message):
    arguments = dict(gallery=torch.eye(3), labels=torch.arange(3), queries=torch.eye(3), k=(1,))
    with pytest.raises(ValueError, match=message):
        knn_predict(**{**arguments, **change})


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


def test_both_forms_have_the_same_accuracy(config, tmp_path, randomize):
    from repa_mm.run import init_model

    model = randomize(init_model(config))
    path = str(tmp_path / 'model.pth')
    torch.save(dict(state_dict=model.state_dict()), path)
    found = {form: knn_evaluate(config, path, form, (1, 5)) for form in ('training', 'deploy')}
    assert found['training'] == found['deploy']
    assert found['deploy'][5] > 50  # colours are told apart by random features
    assert knn_evaluate(config, None, 'pixels', (1,))[1] == 100


@pytest.mark.parametrize('where', ['model', 'top'])
def test_accuracy_is_that_of_scikit_learn_on_the_same_features(config, folder, where, randomize):
    """Features of normalized images, wherever the config says how to normalize them."""
    from repa_mm.run import init_model

    if where == 'top':  # as MMPretrain's own configs
        line = next(x for x in CONFIG.splitlines(True) if 'data_preprocessor' in x)
        text = Path(config).read_text().replace(line, '')
        Path(config).write_text(text + line.strip().rstrip(',') + '\n')
    torch.manual_seed(0)
    model = randomize(init_model(config))
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
    found = knn_evaluate(config, path, 'training', (1, 5, 10))
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


def test_vanilla_model_is_taken_as_it_is(config):
    text = Path(config).read_text().replace('RePaVisionTransformer', 'VisionTransformer')
    Path(config).write_text(text)
    assert 0 <= knn_evaluate(config, None, 'deploy', (1,))[1] <= 100


def test_numbers_are_checked_before_the_images_are_looked_at(config):
    with pytest.raises(ValueError, match='from 1 to 24.*--k'):
        knn_evaluate(config, None, k=(25,), progress=lambda *_: pytest.fail('looked'))


@pytest.mark.parametrize(
    'output, expected',
    [
        (torch.arange(6.0).reshape(1, 3, 2), [0, 1]),
        ((torch.zeros(1), torch.tensor([[1.0, 2.0]])), [1, 2]),
        (torch.arange(8.0).reshape(1, 2, 2, 2), [1.5, 5.5]),
    ],
)
def test_vector_of_an_output(output, expected):
    assert _vector(output)[0].tolist() == expected
    with pytest.raises(ValueError, match='no feature map'):
        _vector((torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.long)))


def test_folder_and_detector(folder, tmp_path):
    from repa_mm import config_path

    found = knn_evaluate(
        config_path('demo/retinanet_repa_swin_digits.py'), None, k=(3,), data=folder
    )
    assert 0 <= found[3] <= 100
    with pytest.raises(ValueError, match='a class for each image'):
        knn_evaluate(config_path('demo/retinanet_repa_swin_digits.py'), None, k=(3,))
    with pytest.raises(FileNotFoundError, match='train'):
        knn_evaluate(
            config_path('demo/retinanet_repa_swin_digits.py'), None, data=str(tmp_path / 'none')
        )


def test_attention_is_that_of_the_last_block(randomize):
    backbone = randomize(MODELS.build(BACKBONE)).eval()
    x = torch.randn(2, 3, 32, 48)
    maps = class_attention(backbone, x)
    assert maps.shape == (2, 2, 4, 6)
    # Replayed from the tokens that the last block sees.
    block, seen = backbone.layers[-1], []
    handle = block.attn.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        backbone(x)
        handle.remove()
        query, key, _ = block.attn.qkv(seen[0]).reshape(2, -1, 3, 2, 8).permute(2, 0, 3, 1, 4)
    weights = (query @ key.transpose(-1, -2) / 8**0.5).softmax(-1)
    torch.testing.assert_close(maps, weights[:, :, 0, 1:].reshape(2, 2, 4, 6))


def test_attention_of_a_model_without_class_token():
    swin = MODELS.build(
        dict(type='RePaSwinTransformer', arch=dict(embed_dims=8, depths=[1] * 4, num_heads=[1] * 4))
    )
    with pytest.raises(ValueError, match='no class token'):
        class_attention(swin, torch.zeros(1, 3, 32, 32))
