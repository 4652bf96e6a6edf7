"""Label maps of images, and where images were cropped."""

import numpy as np
import pytest
import torch
from mmengine.registry import TRANSFORMS

import projects.lvvit  # noqa: F401, registers


def test_crop_box():
    """A picture of its own coordinates tells what was cropped."""
    picture = np.zeros((60, 80, 3), np.float32)
    picture[..., 0] = (np.arange(80) + 0.5) / 80
    picture[..., 1] = (np.arange(60)[:, None] + 0.5) / 60
    crop = TRANSFORMS.build(
        dict(type='RandomResizedCropWithBox', scale=16, crop_ratio_range=(0.2, 0.5))
    )
    for _ in range(5):
        results = crop(dict(img=picture.copy()))
        left, top, right, bottom = results['crop_box'].tolist()
        x, y, _ = results['img'].reshape(-1, 3).mean(0)
        assert x == pytest.approx((left + right) / 2, abs=0.02)
        assert y == pytest.approx((top + bottom) / 2, abs=0.02)
        assert 0.15 < (right - left) * (bottom - top) < 0.55


def test_label_map_of_an_image(tmp_path):
    results = dict(img_path=str(tmp_path / 'train' / 'n01440764' / 'n01440764_18.JPEG'))
    labels = torch.rand(2, 5, 6, 6)
    (tmp_path / 'maps' / 'n01440764').mkdir(parents=True)
    torch.save(labels, tmp_path / 'maps' / 'n01440764' / 'n01440764_18.pt')
    load = TRANSFORMS.build(dict(type='LoadTokenLabels', label_root=str(tmp_path / 'maps')))
    assert torch.equal(load(dict(results))['token_labels'], labels)
    assert TRANSFORMS.build(dict(type='LoadTokenLabels'))(dict(results)) == results
