"""The demo data set: what is in it, and that it is written whole or not at all."""

import hashlib
import json
import os
import os.path as osp
import subprocess
import sys

import cv2
import numpy as np
import pytest

pytest.importorskip('sklearn')
pytest.importorskip('skimage')

from repa_mm.demo import dataset  # noqa: E402
from repa_mm.demo.dataset import DIGITS, write_digit_scenes  # noqa: E402

SIX = dict(num_train=6, num_val=6)


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    root = str(tmp_path_factory.mktemp('data') / 'demo')
    assert write_digit_scenes(root, **SIX)
    return root


def annotations(root, split):
    with open(osp.join(root, 'coco', 'annotations', f'instances_{split}2017.json')) as f:
        return json.load(f)


def digest(root):
    """A hash of the names and contents of all files."""
    result = hashlib.sha256()
    for folder, folders, files in os.walk(root):
        folders.sort()
        for name in sorted(files):
            path = osp.join(folder, name)
            result.update(osp.relpath(path, root).encode())
            with open(path, 'rb') as f:
                result.update(f.read())
    return result.hexdigest()


def decode(rle):
    """The mask of an uncompressed RLE, written independently of the encoder."""
    height, width = rle['size']
    values = np.arange(len(rle['counts'])) % 2
    return np.repeat(values, rle['counts']).reshape(width, height).T.astype(bool)


def test_layout(root):
    listing = {osp.relpath(folder, root): len(files) for folder, _, files in os.walk(root) if files}
    ade = osp.join('ade', 'images'), osp.join('ade', 'annotations')
    assert listing == {
        '.': 1,
        osp.join('coco', 'annotations'): 2,
        osp.join('coco', 'train2017'): 6,
        osp.join('coco', 'val2017'): 6,
        **{osp.join(a, split): 6 for a in ade for split in ('training', 'validation')},
    }


def test_same_arguments_same_bytes(root, tmp_path):
    write_digit_scenes(str(tmp_path / 'again'), **SIX)
    assert digest(str(tmp_path / 'again')) == digest(root)
    write_digit_scenes(str(tmp_path / 'other'), **SIX, seed=1)
    assert digest(str(tmp_path / 'other')) != digest(root)


def test_scenes_do_not_depend_on_their_number(root, tmp_path):
    more = str(tmp_path / 'more')
    write_digit_scenes(more, num_train=7, num_val=6)
    name = osp.join('coco', 'train2017', f'{6:012d}.jpg')
    with open(osp.join(root, name), 'rb') as a, open(osp.join(more, name), 'rb') as b:
        assert a.read() == b.read()


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


def test_digit_is_what_the_scan_says(root):
    from sklearn.datasets import load_digits

    target = load_digits().target
    for split in ('train', 'val'):
        for a in annotations(root, split)['annotations']:
            assert target[a['scan']] == a['category_id'] - 1


def test_train_and_val_share_nothing():
    labels = np.arange(500) % 10
    splits = dataset._split_scans(labels, seed=0)
    train, val = (set(np.concatenate(splits[s]).tolist()) for s in ('train', 'val'))
    assert not train & val and len(train | val) == 500
    assert len(val) == 100
    # The backgrounds come from two sides of a photograph.
    photograph = np.zeros((200, 400, 3), np.uint8)
    photograph[:, :280] = 100
    for i in range(20):
        rng = np.random.default_rng(i)
        assert dataset._background(rng, photograph, 'train', 64).min() > 0
        assert dataset._background(rng, photograph, 'val', 64).max() == 0


def test_scans_of_written_splits_are_disjoint(tmp_path):
    root = str(tmp_path / 'demo')
    write_digit_scenes(root, num_train=40, num_val=20, size=64)
    train, val = (
        {a['scan'] for a in annotations(root, s)['annotations']} for s in ('train', 'val')
    )
    assert train and val and not train & val
    image_ids = [{i['id'] for i in annotations(root, s)['images']} for s in ('train', 'val')]
    assert not image_ids[0] & image_ids[1]


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


def test_mmdet_reads_it(root):
    pytest.importorskip('mmdet')
    from mmcv.transforms import LoadImageFromFile
    from mmdet.datasets import CocoDataset
    from mmdet.datasets.transforms import LoadAnnotations

    data = CocoDataset(
        data_root=osp.join(root, 'coco'),
        ann_file='annotations/instances_train2017.json',
        data_prefix=dict(img='train2017/'),
        metainfo=dict(classes=DIGITS),
        pipeline=[LoadImageFromFile(), LoadAnnotations(with_bbox=True, with_mask=True)],
    )
    content = annotations(root, 'train')
    assert len(data) == 6
    for i, image in enumerate(content['images']):
        expected = [a for a in content['annotations'] if a['image_id'] == image['id']]
        result = data[i]
        assert result['img'].shape == (160, 160, 3)
        assert result['gt_bboxes_labels'].tolist() == [a['category_id'] - 1 for a in expected]
        assert not result['gt_ignore_flags'].any()
        for mask, a in zip(result['gt_masks'].masks, expected):
            assert (mask == decode(a['segmentation'])).all()


def test_mmseg_reads_it(root):
    pytest.importorskip('mmseg')
    from mmcv.transforms import LoadImageFromFile
    from mmseg.datasets import BaseSegDataset
    from mmseg.datasets.transforms import LoadAnnotations

    data = BaseSegDataset(
        data_root=osp.join(root, 'ade'),
        reduce_zero_label=True,
        seg_map_suffix='.png',
        data_prefix=dict(img_path='images/validation', seg_map_path='annotations/validation'),
        metainfo=dict(classes=('background', *DIGITS), palette=[[i] * 3 for i in range(11)]),
        pipeline=[LoadImageFromFile(), LoadAnnotations()],
    )
    assert len(data) == 6
    for i in range(6):
        labels = data[i]['gt_seg_map']
        assert labels.shape == (160, 160)
        assert set(np.unique(labels)) <= set(range(11)) and labels.min() == 0


def test_written_once(root, monkeypatch):
    before = digest(root)
    monkeypatch.setattr(dataset, '_load_scans', lambda: pytest.fail('written again'))
    assert not write_digit_scenes(root, **SIX)
    assert digest(root) == before


def test_other_parameters_or_missing_files_are_made_anew(tmp_path):
    root = str(tmp_path / 'demo')
    write_digit_scenes(root, num_train=1, num_val=1)
    assert write_digit_scenes(root, num_train=2, num_val=1)
    assert len(annotations(root, 'train')['images']) == 2
    os.remove(osp.join(root, 'coco', 'train2017', f'{1:012d}.jpg'))
    assert write_digit_scenes(root, num_train=2, num_val=1)
    assert len(os.listdir(osp.join(root, 'coco', 'train2017'))) == 2
    assert os.listdir(tmp_path) == ['demo']


@pytest.mark.parametrize('content', ['notes.txt', 'coco', dataset.STAMP])
def test_foreign_folder_is_left_alone(tmp_path, content):
    root = tmp_path / 'demo'
    root.mkdir()
    if content == 'coco':
        (root / content).mkdir()
    else:
        (root / content).write_text('{"generator": "somebody else"}')
    with pytest.raises(FileExistsError, match='not a demo set'):
        write_digit_scenes(str(root), **SIX)
    assert os.listdir(root) == [content] and os.listdir(tmp_path) == ['demo']


def test_empty_folder_is_used(tmp_path):
    assert write_digit_scenes(str(tmp_path), num_train=1, num_val=1)
    assert osp.isfile(tmp_path / dataset.STAMP)


def test_interrupted_writing_leaves_nothing(tmp_path, monkeypatch):
    root = tmp_path / 'demo'
    write_digit_scenes(str(root), num_train=1, num_val=1)
    before = digest(str(root))
    compose, calls = dataset._compose, []

    def interrupted(*args):
        calls.append(None)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return compose(*args)

    monkeypatch.setattr(dataset, '_compose', interrupted)
    for target in (root, tmp_path / 'fresh'):
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            write_digit_scenes(str(target), **SIX)
    assert digest(str(root)) == before
    assert os.listdir(tmp_path) == ['demo']


@pytest.mark.parametrize(
    'arguments',
    [dict(num_train=0), dict(num_val=-1), dict(size=10), dict(num_train=2.5), dict(seed=-1)],
)
def test_bad_numbers(tmp_path, arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        write_digit_scenes(str(tmp_path / 'demo'), **arguments)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize('package', ['sklearn', 'skimage'])
def test_missing_package_says_what_to_install(tmp_path, monkeypatch, package):
    for name in [n for n in sys.modules if n.split('.')[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r'pip install -e \.\[demo\]'):
        write_digit_scenes(str(tmp_path / 'demo'), **SIX)


def test_command_line(tmp_path):
    tool = osp.join(osp.dirname(__file__), '..', '..', 'tools', 'make_demo_data.py')
    command = [
        sys.executable,
        tool,
        '--root',
        str(tmp_path / 'demo'),
        '--num-train',
        '2',
        '--num-val',
        '1',
        '--size',
        '96',
    ]
    first = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 'Wrote 2 training and 1 validation scenes' in first.stdout
    second = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 'already has these scenes' in second.stdout
    command[3] = str(tmp_path)
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 1 and 'not a demo set' in refused.stderr
    assert 'Traceback' not in refused.stderr
