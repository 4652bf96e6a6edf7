"""Images without annotations."""

import mmcv
import numpy as np
import pytest

from repa_mm.datasets import ImageFolder


def test_images_of_a_folder_and_its_folders(tmp_path):
    for number, name in enumerate(('b.png', 'a/c.JPG', 'a/d.png')):
        mmcv.imwrite(np.full((4, 4, 3), 10 * number, np.uint8), str(tmp_path / name))
    (tmp_path / 'a' / 'notes.txt').touch()
    steps = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations')]
    images = ImageFolder(str(tmp_path), steps)
    assert [item['img'][0, 0, 0] for item in map(images.__getitem__, range(3))] == [10, 20, 0]
    with pytest.raises(FileNotFoundError, match='no image'):
        ImageFolder(str(tmp_path / 'none'), steps)
