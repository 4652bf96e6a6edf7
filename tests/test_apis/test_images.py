"""Images without annotations, and crops."""

import mmcv
import numpy as np
import pytest
import torch
from mmengine.structures import BaseDataElement

from repa_mm.apis.images import ImageFolder, cropped, evenly


def test_images_of_a_folder_and_its_folders(tmp_path):
    for number, name in enumerate(('b.png', 'a/c.JPG', 'a/d.png')):
        mmcv.imwrite(np.full((4, 4, 3), 10 * number, np.uint8), str(tmp_path / name))
    (tmp_path / 'a' / 'notes.txt').touch()
    steps = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations')]
    images = ImageFolder(str(tmp_path), steps)
    assert [item['img'][0, 0, 0] for item in map(images.__getitem__, range(3))] == [10, 20, 0]
    with pytest.raises(FileNotFoundError, match='no image'):
        ImageFolder(str(tmp_path / 'none'), steps)


def test_large_images_are_cropped():
    image = torch.arange(3 * 9 * 7).view(3, 9, 7)
    data = dict(inputs=[image], data_samples=[BaseDataElement(metainfo=dict(img_shape=(9, 7)))])
    small = cropped(data, 5)
    (crop,), (sample,) = small['inputs'], small['data_samples']
    assert crop.shape == (3, 5, 5) and sample.img_shape == (5, 5)
    assert any(
        torch.equal(crop, image[:, y : y + 5, x : x + 5]) for y in range(5) for x in range(3)
    )
    same = cropped(data, 9)
    assert torch.equal(same['inputs'][0], image) and data['data_samples'][0].img_shape == (9, 7)


@pytest.mark.parametrize(
    'number, total, found',
    [(3, 9, [0, 3, 6]), (4, 10, [0, 2, 5, 7]), (5, 3, [0, 1, 2]), (1, 7, [0])],
)
def test_evenly(number, total, found):
    assert evenly(number, total) == found
