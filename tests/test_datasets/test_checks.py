"""Images whose files or annotations are not what they should be."""

import logging
import os
import re
import threading

import cv2
import numpy as np
import pytest
from mmengine.dataset import BaseDataset
from mmengine.logging import MMLogger

from repa_mm.datasets.checks import check_items


@pytest.fixture
def jpeg():
    image = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    return cv2.imencode('.jpg', image)[1].tobytes()


def dataset_of(path, content, **annotation):
    """A checked data set with one image."""
    path.write_bytes(content)

    class OneImage(BaseDataset):
        def load_data_list(self):
            return [dict(img_path=str(path), **annotation)]

    def pack(results):
        return dict(inputs=results['img'])

    load = dict(type='mmcv.LoadImageFromFile')
    dataset = OneImage(pipeline=[load, pack])
    check_items(dataset)
    return dataset


def test_size_of_the_annotation(tmp_path, jpeg):
    path = tmp_path / 'a.jpg'
    assert dataset_of(path, jpeg, height=64, width=96)[0]['inputs'].shape == (64, 96, 3)
    for height, width in ((96, 64), (64, 97), (128, 192)):
        with pytest.raises(ValueError, match=rf'a\.jpg.* 64x96 pixels.* {height}x{width}'):
            dataset_of(path, jpeg, height=height, width=width)[0]


def test_what_libjpeg_says_names_the_file(tmp_path, jpeg, capfd):
    half = len(jpeg) // 2
    damaged = jpeg[:half] + bytes(200) + jpeg[half + 200 :]
    dataset = dataset_of(tmp_path / 'hole.jpg', damaged)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = MMLogger.get_current_instance()
    logger.addHandler(handler)
    try:
        assert dataset[0]['inputs'].shape == (64, 96, 3)
    finally:
        logger.removeHandler(handler)
    (line,) = lines
    assert re.match(r"'.*/hole\.jpg': Corrupt JPEG data", line)
    assert capfd.readouterr().err == ''
    # Afterwards everything is printed as ever.
    os.write(2, b'as ever\n')
    assert capfd.readouterr().err == 'as ever\n'


def test_images_in_several_threads(tmp_path, jpeg, capfd):
    dataset = dataset_of(tmp_path / 'a.jpg', jpeg)
    threads = [threading.Thread(target=lambda: [dataset[0] for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(2, b'as ever\n')
    assert capfd.readouterr().err == 'as ever\n'
