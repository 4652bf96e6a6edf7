"""The demo's data set: what is in it, and that it is written whole."""

import json
import os
import os.path as osp
from pathlib import Path

import cv2
import numpy as np
import pytest

from demo import dataset
from demo.dataset import DIGITS, write_digit_scenes

SIX = dict(num_train=6, num_val=6)


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    root = str(tmp_path_factory.mktemp('data') / 'demo')
    write_digit_scenes(root, **SIX)
    return root


def annotations(root, split):
    with open(osp.join(root, 'coco', 'annotations', f'instances_{split}2017.json')) as f:
        return json.load(f)


def files(root):
    """The contents of all files by their names."""
    return {p.relative_to(root): p.read_bytes() for p in Path(root).rglob('*') if p.is_file()}


def decode(rle):
    """The mask of an uncompressed RLE, written independently of the encoder."""
    height, width = rle['size']
    values = np.arange(len(rle['counts'])) % 2
    return np.repeat(values, rle['counts']).reshape(width, height).T.astype(bool)


def test_same_arguments_same_bytes(root, tmp_path):
    write_digit_scenes(str(tmp_path), **SIX)  # is there: nothing is written
    assert not os.listdir(tmp_path)
    write_digit_scenes(str(tmp_path / 'again'), **SIX)
    assert files(tmp_path / 'again') == files(root)
    # A scene does not depend on how many there are.
    write_digit_scenes(str(tmp_path / 'fewer'), num_train=2, num_val=1)
    name = osp.join('coco', 'train2017', f'{2:012d}.jpg')
    assert (tmp_path / 'fewer' / name).read_bytes() == (tmp_path / 'again' / name).read_bytes()


@pytest.mark.parametrize('split', ['train', 'val'])
def test_annotations(root, split):
    content = annotations(root, split)
    assert [c['name'] for c in content['categories']] == list(DIGITS)
    assert [c['id'] for c in content['categories']] == list(range(1, 11))
    ids = [a['id'] for a in content['annotations']]
    assert len(set(ids)) == len(ids)
    covered = {}
    for a in content['annotations']:
        mask = decode(a['segmentation'])
        assert mask.shape == (160, 160)
        rows, cols = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        x, y, w, h = a['bbox']
        # The box is the tight one around the mask.
        assert (x, y, x + w, y + h) == (cols[0], rows[0], cols[-1] + 1, rows[-1] + 1)
        assert a['area'] == mask.sum() > 0 and a['iscrowd'] == 0
        assert 18 <= h <= 70
        total = covered.setdefault(a['image_id'], np.zeros((160, 160), int))
        total += mask
    assert set(covered) == {i['id'] for i in content['images']}
    assert max(c.max() for c in covered.values()) == 1, 'digits hide one another'
    per_scene = np.unique([a['image_id'] for a in content['annotations']], return_counts=True)[1]
    assert per_scene.min() >= 2 and per_scene.max() <= 6


def test_backgrounds_come_from_two_sides_of_a_photograph():
    photograph = np.zeros((200, 400, 3), np.uint8)
    photograph[:, :280] = 100
    for i in range(20):
        rng = np.random.default_rng(i)
        assert dataset._background(rng, dataset._side(photograph, 'train'), 64).min() > 0
        assert dataset._background(rng, dataset._side(photograph, 'val'), 64).max() == 0


def test_scans_of_written_splits(tmp_path):
    from sklearn.datasets import load_digits

    root, target = str(tmp_path / 'demo'), load_digits().target
    write_digit_scenes(root, num_train=40, num_val=20, size=64)
    scans, image_ids = [], []
    for split in ('train', 'val'):
        content = annotations(root, split)
        scans.append({a['scan'] for a in content['annotations']})
        image_ids.append({i['id'] for i in content['images']})
        assert all(target[a['scan']] == a['category_id'] - 1 for a in content['annotations'])
    assert all(scans) and not scans[0] & scans[1] and not image_ids[0] & image_ids[1]


def test_label_maps_agree_with_masks(root):
    content = annotations(root, 'val')
    for number, image in enumerate(content['images'], 1):
        name = f'ADE_val_{number:08d}'
        folder = osp.join(root, 'ade', '{}', 'validation', name)
        expected = np.ones((160, 160), np.uint8)
        for a in content['annotations']:
            if a['image_id'] == image['id']:
                expected[decode(a['segmentation'])] = a['category_id'] + 1
        label_map = cv2.imread(folder.format('annotations') + '.png', cv2.IMREAD_UNCHANGED)
        assert (label_map == expected).all()
        coco = osp.join(root, 'coco', 'val2017', image['file_name'])
        with open(coco, 'rb') as a, open(folder.format('images') + '.jpg', 'rb') as b:
            assert a.read() == b.read()


def test_complete_or_absent(tmp_path, monkeypatch):
    """A set that was interrupted is made anew."""
    root, write = tmp_path / 'new' / 'demo', dataset._write_split

    def interrupted(*args):
        write(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(dataset, '_write_split', interrupted)
        write_digit_scenes(str(root), num_train=2, num_val=1)
    assert not root.exists()
    write_digit_scenes(str(root), num_train=1, num_val=1)
    assert os.listdir(root.parent) == ['demo']
