"""Images without annotations, and crops."""

import mmcv
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.structures import BaseDataElement

from repa_mm.apis import read_images
from repa_mm.apis.images import cropped


def test_images_of_a_folder_and_its_folders(tmp_path):
    """From all over them, so of all classes, and without their annotations."""
    for number, name in enumerate(('d.png', 'a/b.png', 'a/c.JPG', 'e/f.png', 'e/a/f.png')):
        mmcv.imwrite(np.full((4, 4, 3), 10 * number, np.uint8), str(tmp_path / name))
    (tmp_path / 'a' / 'notes.txt').touch()
    steps = [dict(type=name) for name in ('LoadImageFromFile', 'LoadAnnotations', 'PackInputs')]
    cfg = Config(dict(test_dataloader=dict(dataset=dict(pipeline=steps))))
    init_default_scope('mmpretrain')
    for number, expected in ((9, [10, 20, 0, 40, 30]), (2, [10, 0])):
        images = [batch['inputs'][0] for batch in read_images(cfg, 'val', number, str(tmp_path))]
        assert [int(image[0, 0, 0]) for image in images] == expected
    with pytest.raises(FileNotFoundError, match='no image'):
        read_images(cfg, 'val', 1, str(tmp_path / 'none'))


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
