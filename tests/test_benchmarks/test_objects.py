"""The scenes of clothes: what is in them."""

import gzip
import json

import cv2
import numpy as np
import pytest
from mmengine.config import Config
from pycocotools import mask as masks

from benchmarks.objects import CLOTHES, read_clothes, read_photographs, write_clothes
from repa_mm import config_path


@pytest.fixture
def clothes_folder(tmp_path):
    rng = np.random.default_rng(0)
    for name, count in (('train', 40), ('t10k', 20)):
        pictures = np.zeros((count, 28, 28), np.uint8)
        pictures[:, 9:20, 1:27] = rng.integers(40, 256, (count, 1, 1))
        pictures[:, 12:17, 8:20] = 0  # a hole
        labels = np.arange(count, dtype=np.uint8) % 10
        for kind, start, values in (('images-idx3', 16, pictures), ('labels-idx1', 8, labels)):
            content = gzip.compress(bytes(start) + values.tobytes())
            (tmp_path / f'{name}-{kind}-ubyte.gz').write_bytes(content)
    for i in range(5):
        pixels = rng.integers(256, size=(200, 300, 3), dtype=np.uint8)
        cv2.imwrite(str(tmp_path / f'{i}.jpg'), pixels)
    return tmp_path


def test_clothes(clothes_folder):
    folder = clothes_folder
    clothes, photographs = read_clothes(folder), read_photographs(folder)
    contents = []
    for root in (folder / 'a', folder / 'b'):
        write_clothes(str(root), clothes, photographs, dict(train=12, val=6), 96)
        paths = sorted(path for path in root.rglob('*') if path.is_file())
        contents.append({path.relative_to(root): path.read_bytes() for path in paths})
    assert contents[0] == contents[1]

    used = {}
    for split in ('train', 'val'):
        path = folder / 'a/coco/annotations' / f'instances_{split}2017.json'
        content = json.loads(path.read_text())
        used[split] = {image['photograph'] for image in content['images']}
        assert [c['name'] for c in content['categories']] == list(CLOTHES)
        assert len(content['images']) == dict(train=12, val=6)[split]
        for a in content['annotations']:
            mask = masks.decode(masks.frPyObjects(a['segmentation'], *a['segmentation']['size']))
            x, y, w, h = a['bbox']
            assert mask[y : y + h, x : x + w].sum() == mask.sum() == a['area']
            assert all(mask[y : y + h, x : x + w].any(axis).all() for axis in (0, 1))
            assert 11 <= w <= 38 and h < 0.7 * w  # 96 / 8 to 96 * 3 / 8 pixels, about
            assert not mask[y + h // 2, x + w // 2]
            assert clothes[split][1][a['scan']] == a['category_id'] - 1
    assert used == dict(train={'1.jpg', '2.jpg', '3.jpg', '4.jpg'}, val={'0.jpg'})
    classes = Config.fromfile(config_path('demo/retinanet_swin_clothes.py')).classes
    assert classes == CLOTHES
