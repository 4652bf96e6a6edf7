"""Crops of photographs, each photograph a class: a small set of real images for DINO.

The photographs lie inside the wheels of scikit-learn and scikit-image. Training crops come from the
left of each photograph, validation crops from the right, so that no pixel is in both. Each crop is
in a light of its own: colours alone would tell the photographs apart.
"""

import os
import os.path as osp
import shutil
from importlib import import_module

import cv2
import numpy as np

from repa_mm.files import check_writable

PHOTOGRAPHS = (
    *(('sklearn', f'datasets/images/{name}') for name in ('china.jpg', 'flower.jpg')),
    *(
        ('skimage', f'data/{name}')
        for name in (
            'astronaut.png', 'brick.png', 'camera.png', 'cell.png', 'chelsea.png', 'coffee.png',
            'coins.png', 'grass.png', 'gravel.png', 'hubble_deep_field.jpg', 'ihc.png',
            'moon.png', 'motorcycle_left.png', 'page.png', 'retina.jpg', 'rocket.jpg', 'text.png',
        )
    ),
)  # fmt: skip
TRAIN_SHARE = 0.6  # left part of each photograph


def write_photos(
    root: str,
    num_train: int = 80,
    num_val: int = 20,
    size: int = 64,
    seed: int = 0,
    light: float = 0.5,
) -> bool:
    """Write square crops, one folder for each photograph, under ``root/train`` and ``root/val``.

    Args:
        root (str): Folder of the set. Written whole, under another name first.
        num_train (int): Number of training crops of a photograph. Defaults to 80.
        num_val (int): Number of validation crops of a photograph. Defaults to 20.
        size (int): Side of a crop in pixels; it shows up to two times as many pixels of the
            photograph. Defaults to 64.
        seed (int): Seed of the places and of the light. Defaults to 0.
        light (float): How much the contrast, the brightness and the brightness of each colour of
            a crop may change, as a share. Defaults to 0.5.

    Returns:
        bool: False if the folder was there already, with something in it.

    Raises:
        ImportError: If scikit-learn or scikit-image is missing.
        ValueError: If a number is below 1, or ``light`` not in [0, 1].
        OSError: If the set cannot be written.
    """
    for name, value in dict(num_train=num_train, num_val=num_val, size=size).items():
        if value < 1:
            raise ValueError(f'{name} must be at least 1, but is {value}')
    if not 0 <= light <= 1:
        raise ValueError(f'light must be in [0, 1], but is {light}')
    root = osp.realpath(root)
    if osp.isdir(root) and os.listdir(root):
        return False
    check_writable(osp.dirname(root))
    generator = np.random.default_rng(seed)
    unfinished = f'{root}.{os.getpid()}.unfinished'
    try:
        for package, path in PHOTOGRAPHS:
            file = osp.join(osp.dirname(import_module(package).__file__), path)
            pixels = cv2.imdecode(np.fromfile(file, np.uint8), cv2.IMREAD_COLOR)
            middle = round(TRAIN_SHARE * pixels.shape[1])
            parts = dict(train=(pixels[:, :middle], num_train), val=(pixels[:, middle:], num_val))
            for split, (part, count) in parts.items():
                name = osp.splitext(osp.basename(path))[0]
                folder = osp.join(unfinished, split, name)
                os.makedirs(folder)
                most = min(2 * size, *part.shape[:2])
                for i in range(count):
                    side = generator.integers(min(size, most), most, endpoint=True)
                    y, x = (generator.integers(0, n - side, endpoint=True) for n in part.shape[:2])
                    crop = cv2.resize(
                        part[y : y + side, x : x + side], (size, size), interpolation=cv2.INTER_AREA
                    )
                    crop = _in_another_light(crop, light, generator)
                    cv2.imencode('.png', crop)[1].tofile(osp.join(folder, f'{i:04d}.png'))
        if osp.isdir(root):
            os.rmdir(root)
        os.rename(unfinished, root)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return True


def _in_another_light(crop: np.ndarray, light: float, generator: np.random.Generator) -> np.ndarray:
    contrast, brightness, *colours = generator.uniform(1 - light, 1 + light, 5)
    mean = crop.mean()
    changed = ((crop - mean) * contrast + mean) * brightness * colours
    return changed.round().clip(0, 255).astype(np.uint8)
