"""Handwritten digits on photographs: a detection and segmentation set made without a download.

The digits are the 1797 real 8x8 scans of ``sklearn.datasets.load_digits`` (UCI, Optical Recognition
of Handwritten Digits), the backgrounds are photographs that lie inside the wheels of scikit-learn
and scikit-image. Training and validation share neither a scan nor a part of a photograph.
"""

import json
import os
import os.path as osp
import shutil
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import cv2
import numpy as np

DIGITS = ('zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine')

# Package, file inside it, id of the licence: only files that are in the wheels.
PHOTOGRAPHS = (
    ('sklearn', 'datasets/images/china.jpg', 2),
    ('sklearn', 'datasets/images/flower.jpg', 2),
    ('skimage', 'data/astronaut.png', 3),
    ('skimage', 'data/chelsea.png', 3),
    ('skimage', 'data/coffee.png', 3),
    ('skimage', 'data/rocket.jpg', 3),
    ('skimage', 'data/camera.png', 3),
)
_CC = 'https://creativecommons.org/'
LICENSES = [
    dict(id=1, name='Attribution 4.0 International (digit scans)', url=f'{_CC}licenses/by/4.0/'),
    dict(id=2, name='Attribution 2.0 Generic', url=f'{_CC}licenses/by/2.0/'),
    dict(id=3, name='Public domain or CC0', url=f'{_CC}publicdomain/zero/1.0/'),
]
INFO = dict(
    description='Handwritten digits on photographs',
    url='',
    version='1.0',
    year=2017,
    contributor='scikit-learn, scikit-image',
    date_created='2017/09/01',
)

TRAIN_SHARE = 0.7  # left part of each photograph; the rest, on the right, is for validation
VAL_SCANS = 0.2  # share of the scans of each digit that only validation scenes use
UPSAMPLE = 8  # the scans are interpolated to 8 times their size before they are placed
INK = 0.5  # ink above this share of full black belongs to the digit
Rng = np.random.Generator
LUMA = np.array([0.114, 0.587, 0.299], np.float32)  # brightness of a BGR colour


def write_digit_scenes(
    root: str, num_train: int = 1200, num_val: int = 200, size: int = 160
) -> None:
    """Write scenes of two to six digits on photographs, in two layouts, unless ``root`` exists.

    ``root/coco`` has COCO 2017's layout (boxes and instance masks, as uncompressed RLE because
    digits have holes), ``root/ade`` has that of ADE20K's ``ADEChallengeData2016`` (label maps:
    0 unlabelled, 1 background, 2 to 11 the digits 0 to 9). Both hold the same images. The same
    arguments and library versions give the same bytes.

    Args:
        root (str): Folder of the set. It appears when the set is complete.
        num_train (int): Number of training scenes. Defaults to 1200.
        num_val (int): Number of validation scenes. Defaults to 200.
        size (int): Width and height of a scene in pixels. Digits are ``size / 8`` to
            ``size * 3 / 8`` pixels tall. Defaults to 160.
    """
    if osp.isdir(root):
        return
    scans, labels = _load_scans()
    photographs = [
        (osp.basename(file), license_id, _load_photograph(package, file))
        for package, file, license_id in PHOTOGRAPHS
    ]
    splits = _split_scans(labels)
    unfinished = osp.normpath(root) + '.unfinished'
    shutil.rmtree(unfinished, ignore_errors=True)
    first_id = 1
    for split, count in (('train', num_train), ('val', num_val)):
        rngs = (np.random.default_rng([0, int(split == 'val'), i]) for i in range(count))
        scenes = (_compose(rng, scans, splits[split], photographs, split, size) for rng in rngs)
        _write_split(unfinished, split, scenes, first_id)
        first_id += count
    os.replace(unfinished, root)


def _load_photograph(package: str, file: str) -> np.ndarray:
    """A photograph that lies inside a package, as BGR pixels (height, width, 3).

    Args:
        package (str): 'sklearn' or 'skimage'.
        file (str): Path inside the package.
    """
    return cv2.imread(osp.join(osp.dirname(import_module(package).__file__), file))


def _load_scans() -> tuple[np.ndarray, np.ndarray]:
    """All scans as smooth ink maps, (N, 80, 80) in [0, 1] with an empty margin, and labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    ink = np.pad(digits.images.astype(np.float32) / 16, ((0, 0), (1, 1), (1, 1)))
    side = UPSAMPLE * ink.shape[1]
    ink = np.stack([cv2.resize(i, (side, side), interpolation=cv2.INTER_CUBIC) for i in ink])
    return ink.clip(0, 1), digits.target


def _split_scans(labels: np.ndarray) -> dict[str, list[np.ndarray]]:
    """Indices of the scans of each digit, for training and for validation."""
    rng = np.random.default_rng([0])
    splits: dict[str, list[np.ndarray]] = dict(train=[], val=[])
    for digit in range(len(DIGITS)):
        indices = rng.permutation(np.flatnonzero(labels == digit))
        num_val = round(len(indices) * VAL_SCANS)
        splits['val'].append(indices[:num_val])
        splits['train'].append(indices[num_val:])
    return splits


def _compose(
    rng: Rng, scans: np.ndarray, indices: list[np.ndarray], photographs: list, split: str, size: int
) -> dict[str, Any]:
    """One scene: its image (size, size, 3) in BGR and the digits on it, each with its mask."""
    name, license_id, photograph = photographs[rng.integers(len(photographs))]
    image = _background(rng, photograph, split, size)
    digits: list[dict] = []
    taken = np.zeros((size, size), bool)
    for _ in range(rng.integers(2, 7)):
        digit = int(rng.integers(len(DIGITS)))
        scan = int(rng.choice(indices[digit]))
        height = rng.uniform(size / 6, size * 3 / 8)
        placed = None
        # Where a large digit finds no free place, a smaller one does.
        while placed is None and height >= size / 8:
            placed = _place(rng, scans[scan], height, taken)
            height *= 0.8
        if placed is None:
            continue
        alpha, (top, left) = placed
        window = np.s_[top : top + alpha.shape[0], left : left + alpha.shape[1]]
        colour = _ink_colour(rng, image[window])
        image[window] += alpha[..., None] * (colour - image[window])
        mask = np.zeros((size, size), bool)
        mask[window] = alpha >= 0.5
        digits.append(dict(digit=digit, scan=scan, mask=mask))
        taken |= mask
    image = image.round().clip(0, 255).astype(np.uint8)
    return dict(image=image, digits=digits, photograph=name, license=license_id)


def _background(rng: Rng, photograph: np.ndarray, split: str, size: int) -> np.ndarray:
    """A random square of one side of a photograph, float32 of (size, size, 3)."""
    border = round(photograph.shape[1] * TRAIN_SHARE)
    region = photograph[:, :border] if split == 'train' else photograph[:, border:]
    side = min(int(rng.integers(128, 257)), *region.shape[:2])
    top = rng.integers(region.shape[0] - side + 1)
    left = rng.integers(region.shape[1] - side + 1)
    crop = region[top : top + side, left : left + side]
    if rng.random() < 0.5:
        crop = crop[:, ::-1]
    crop = cv2.resize(
        np.ascontiguousarray(crop),
        (size, size),
        interpolation=cv2.INTER_AREA if side > size else cv2.INTER_CUBIC,
    )
    # Dimmed, as by dusk: the digits are bright on every scene.
    return crop.astype(np.float32) * np.float32(rng.uniform(0.45, 0.65))


def _place(
    rng: Rng, ink: np.ndarray, height: float, taken: np.ndarray
) -> tuple[np.ndarray, tuple[int, int]] | None:
    """Opacity of a digit, cut to its ink, and a place (top, left) where it hides no other."""
    alpha = _digit_opacity(rng, ink, height)
    h, w = alpha.shape
    if h > taken.shape[0] or w > taken.shape[1]:
        return None
    body = alpha >= 0.5
    for _ in range(40):
        top = int(rng.integers(taken.shape[0] - h + 1))
        left = int(rng.integers(taken.shape[1] - w + 1))
        # Ink never covers ink, so every digit stays readable, but boxes may overlap a little.
        under = taken[top : top + h, left : left + w]
        if under.sum() <= 0.03 * h * w and not (under & body).any():
            return alpha, (top, left)
    return None


def _digit_opacity(rng: Rng, ink: np.ndarray, height: float) -> np.ndarray:
    """A scan at ``height`` pixels, a little rotated and sheared; opacity in [0, 1]."""
    rows = np.flatnonzero((ink > INK).any(1))
    scale = height / (rows[-1] - rows[0] + 1)
    angle = np.deg2rad(rng.uniform(-8, 8))
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    shear = np.array([[1, rng.uniform(-0.1, 0.1)], [0, 1]])
    matrix = scale * turn @ shear
    canvas = int(np.ceil(ink.shape[0] * scale * 1.5))
    shift = canvas / 2 - matrix @ (np.array(ink.shape[::-1]) / 2)
    warped = cv2.warpAffine(
        ink, np.column_stack([matrix, shift]), (canvas, canvas), flags=cv2.INTER_LINEAR
    )
    # The steeper, the sharper the pen; this keeps the edge about two pixels wide at any size.
    steepness = UPSAMPLE * scale / 2
    alpha = ((warped - INK) * steepness + 0.5).clip(0, 1)
    rows, cols = np.flatnonzero((alpha >= 0.5).any(1)), np.flatnonzero((alpha >= 0.5).any(0))
    return alpha[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]


def _ink_colour(rng: Rng, under: np.ndarray) -> np.ndarray:
    """A random bright BGR colour that stands out from what lies under and around it."""
    brightness = under.reshape(-1, 3) @ LUMA
    best, best_contrast = None, -1.0
    for _ in range(16):
        # Hue, saturation and value.
        hsv = [rng.uniform(0, 180), rng.uniform(0, 110), rng.uniform(215, 255)]
        colour = cv2.cvtColor(np.array([[hsv]]).astype(np.uint8), cv2.COLOR_HSV2BGR)
        colour = colour[0, 0].astype(np.float32)
        # A low percentile and not the mean: on a striped background the mean is far from
        # a colour that one of the stripes has.
        contrast = float(np.percentile(abs(brightness - colour @ LUMA), 20))
        if contrast > best_contrast:
            best, best_contrast = colour, contrast
        if contrast >= 80:
            break
    return best


def _write_split(root: str, split: str, scenes: Iterable[dict], first_id: int) -> None:
    """Write the scenes of one split in both layouts."""
    ade_split = dict(train='training', val='validation')[split]
    coco, ade_images, ade_labels, coco_annotations = folders = [
        osp.join(root, 'coco', f'{split}2017'),
        osp.join(root, 'ade', 'images', ade_split),
        osp.join(root, 'ade', 'annotations', ade_split),
        osp.join(root, 'coco', 'annotations'),
    ]
    for folder in folders:
        os.makedirs(folder, exist_ok=True)

    images, annotations = [], []
    for number, scene in enumerate(scenes, 1):
        image_id = first_id + number - 1
        height, width = scene['image'].shape[:2]
        file_name = f'{image_id:012d}.jpg'
        images.append(
            dict(
                license=scene['license'],
                file_name=file_name,
                height=height,
                width=width,
                date_captured='1998-07-01 00:00:00',
                id=image_id,
                photograph=scene['photograph'],
            )
        )
        label_map = np.ones((height, width), np.uint8)
        for n, digit in enumerate(scene['digits']):
            mask = digit['mask']
            annotations.append(
                dict(
                    segmentation=_encode(mask),
                    area=int(mask.sum()),
                    iscrowd=0,
                    image_id=image_id,
                    bbox=list(cv2.boundingRect(mask.astype(np.uint8))),
                    category_id=digit['digit'] + 1,
                    id=10 * image_id + n,
                    scan=digit['scan'],
                )
            )
            label_map[mask] = digit['digit'] + 2
        name = f'ADE_{split}_{number:08d}'
        for path in (osp.join(coco, file_name), osp.join(ade_images, f'{name}.jpg')):
            cv2.imwrite(path, scene['image'], [cv2.IMWRITE_JPEG_QUALITY, 95])
        cv2.imwrite(osp.join(ade_labels, f'{name}.png'), label_map)

    categories = [dict(supercategory='digit', id=i, name=name) for i, name in enumerate(DIGITS, 1)]
    content = dict(
        info=INFO, licenses=LICENSES, images=images, annotations=annotations, categories=categories
    )
    with open(osp.join(coco_annotations, f'instances_{split}2017.json'), 'w') as file:
        json.dump(content, file)


def _encode(mask: np.ndarray) -> dict[str, list[int]]:
    """COCO's uncompressed RLE of a mask (H, W): column by column, the first run is empty ink."""
    flat = np.concatenate([[0], mask.ravel(order='F').astype(np.int8), [0]])
    runs = np.diff(np.concatenate([[0], np.flatnonzero(np.diff(flat)), [mask.size]]))
    return dict(counts=runs.tolist(), size=list(mask.shape))
