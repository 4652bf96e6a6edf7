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

from repa_mm.files import check_writable

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
_CC = 'https://creativecommons.org/{}/'
LICENSES = (
    dict(
        id=1, name='Attribution 4.0 International (digit scans)', url=_CC.format('licenses/by/4.0')
    ),
    dict(id=2, name='Attribution 2.0 Generic', url=_CC.format('licenses/by/2.0')),
    dict(id=3, name='Public domain or CC0', url=_CC.format('publicdomain/zero/1.0')),
)
INFO = dict(
    description='Handwritten digits on photographs',
    url='',
    version='1.0',
    year=2017,
    contributor='scikit-learn, scikit-image',
    date_created='2017/09/01',
)

STAMP = 'dataset.json'
# Raise the version whenever the scenes change, so that sets of older code are made anew.
FORMAT = dict(generator='repa_mm.demo', version=2)

TRAIN_SHARE = 0.7  # left part of each photograph; the rest, on the right, is for validation
VAL_SCANS = 0.2  # share of the scans of each digit that only validation scenes use
UPSAMPLE = 8  # the scans are interpolated to 8 times their size before they are placed
INK = 0.5  # ink above this share of full black belongs to the digit
Rng = np.random.Generator
LUMA = np.array([0.114, 0.587, 0.299], np.float32)  # brightness of a BGR colour


def write_digit_scenes(
    root: str, num_train: int = 1200, num_val: int = 200, size: int = 160, seed: int = 0
) -> bool:
    """Write scenes of two to six digits on photographs, in two layouts.

    ``root/coco`` has COCO 2017's layout (boxes and instance masks, as uncompressed RLE because
    digits have holes), ``root/ade`` has that of ADE20K's ``ADEChallengeData2016`` (label maps:
    0 unlabelled, 1 background, 2 to 11 the digits 0 to 9). Both hold the same images. The same
    arguments and library versions give the same bytes.

    The set is written to a folder beside ``root`` and renamed when it is complete, so an
    interrupted call leaves no partial set at ``root``.

    Args:
        root (str): Folder of the set. Created; replaced if it holds a demo set with other
            parameters or an incomplete one.
        num_train (int): Number of training scenes. Defaults to 1200.
        num_val (int): Number of validation scenes. Defaults to 200.
        size (int): Width and height of a scene in pixels. Digits are ``size / 8`` to
            ``size * 3 / 8`` pixels tall. Defaults to 160.
        seed (int): Seed of everything that is drawn at random. Defaults to 0.

    Returns:
        bool: True if the set was written, False if it was there already.

    Raises:
        ImportError: If scikit-learn or scikit-image is missing.
        FileExistsError: If ``root`` exists and holds something else than a demo set.
        OSError: If the set cannot be written, or the disk is too full; names the path.
        ValueError: If a number is out of range.
    """
    if not root:
        raise ValueError('the root must be the name of a folder, got an empty one')
    parameters = dict(num_train=num_train, num_val=num_val, size=size, seed=seed)
    ranges = dict(num_train=(1, 10**7), num_val=(1, 10**7), size=(64, 2048), seed=(0, 2**64))
    for name, value in parameters.items():
        least, most = ranges[name]
        if not isinstance(value, (int, np.integer)) or not least <= value <= most:
            raise ValueError(f'{name} must be an integer from {least} to {most}, got {value!r}')
        parameters[name] = int(value)
    root = osp.realpath(root)
    if _is_complete(root, parameters):
        return False
    if (
        osp.lexists(root)
        and not _read_stamp(root)
        and not (osp.isdir(root) and not os.listdir(root))
    ):
        raise FileExistsError(
            f'{root} exists and is not a demo set written by this program (it has no {STAMP}). '
            'Nothing was changed: choose another --root, or remove it.'
        )
    scans, labels = _load_scans()
    photographs = _load_photographs()
    splits = _split_scans(labels, seed)
    _check_space(osp.dirname(root), (num_train + num_val) * size**2)
    unfinished = osp.join(osp.dirname(root), f'.{osp.basename(root)}.{os.getpid()}.unfinished')
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        first_id = 1
        for split, count in (('train', num_train), ('val', num_val)):
            rngs = (np.random.default_rng([seed, int(split == 'val'), i]) for i in range(count))
            scenes = (_compose(rng, scans, splits[split], photographs, split, size) for rng in rngs)
            _write_split(unfinished, split, scenes, first_id)
            first_id += count
        _write_json(dict(FORMAT, parameters=parameters), osp.join(unfinished, STAMP), indent=2)
        _move_into_place(unfinished, root, parameters)
    except OSError as error:
        raise OSError(
            f'cannot write the demo set to {root!r}: {error.strerror or error}'
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return True


def _import(package: str, name: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise ImportError(
            f'{name} is missing. The demo data is composed from pictures bundled with scikit-learn '
            'and scikit-image. Install them with `pip install -e .[demo]` (or `pip install '
            'scikit-learn scikit-image`).'
        ) from error


def _load_scans() -> tuple[np.ndarray, np.ndarray]:
    """All scans as smooth ink maps, (N, 80, 80) in [0, 1] with an empty margin, and labels."""
    digits = _import('sklearn.datasets', 'scikit-learn').load_digits()
    ink = np.pad(digits.images.astype(np.float32) / 16, ((0, 0), (1, 1), (1, 1)))
    side = UPSAMPLE * ink.shape[1]
    ink = np.stack([cv2.resize(i, (side, side), interpolation=cv2.INTER_CUBIC) for i in ink])
    return ink.clip(0, 1), digits.target


def _load_photographs() -> list[tuple[str, int, np.ndarray]]:
    """(file name, licence id, BGR image) of every photograph."""
    photographs = []
    for package, file, license_id in PHOTOGRAPHS:
        name = dict(sklearn='scikit-learn', skimage='scikit-image')[package]
        path = osp.join(osp.dirname(_import(package, name).__file__), *file.split('/'))
        image = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR)
        photographs.append((osp.basename(path), license_id, image))
    return photographs


def _split_scans(labels: np.ndarray, seed: int) -> dict[str, list[np.ndarray]]:
    """Indices of the scans of each digit, for training and for validation."""
    rng = np.random.default_rng([seed])
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
    folders = (
        ['coco', f'{split}2017'],
        ['ade', 'images', ade_split],
        ['ade', 'annotations', ade_split],
    )
    coco, ade_images, ade_labels = (osp.join(root, *parts) for parts in folders)
    for folder in (coco, ade_images, ade_labels, osp.join(root, 'coco', 'annotations')):
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
            left, top, *size = cv2.boundingRect(mask.astype(np.uint8))
            annotations.append(
                dict(
                    segmentation=_encode(mask),
                    area=int(mask.sum()),
                    iscrowd=0,
                    image_id=image_id,
                    bbox=[left, top, *size],
                    category_id=digit['digit'] + 1,
                    id=10 * image_id + n,
                    scan=digit['scan'],
                )
            )
            label_map[mask] = digit['digit'] + 2
        name = f'ADE_{split}_{number:08d}'
        quality = [cv2.IMWRITE_JPEG_QUALITY, 95]
        for path in (osp.join(coco, file_name), osp.join(ade_images, f'{name}.jpg')):
            _write_image(scene['image'], path, quality)
        _write_image(label_map, osp.join(ade_labels, f'{name}.png'))

    categories = [dict(supercategory='digit', id=i, name=name) for i, name in enumerate(DIGITS, 1)]
    content = dict(
        info=INFO,
        licenses=list(LICENSES),
        images=images,
        annotations=annotations,
        categories=categories,
    )
    _write_json(content, osp.join(root, 'coco', 'annotations', f'instances_{split}2017.json'))


def _encode(mask: np.ndarray) -> dict[str, list[int]]:
    """COCO's uncompressed RLE of a mask (H, W): column by column, the first run is empty ink."""
    flat = np.concatenate([[0], mask.ravel(order='F').astype(np.int8), [0]])
    runs = np.diff(np.concatenate([[0], np.flatnonzero(np.diff(flat)), [mask.size]]))
    return dict(counts=runs.tolist(), size=list(mask.shape))


def _write_image(image: np.ndarray, path: str, options: Iterable[int] = ()) -> None:
    # cv2.imwrite reports a full disk by its return value only and fails on some path names.
    _, data = cv2.imencode(osp.splitext(path)[1], image, list(options))
    with open(path, 'wb') as file:
        file.write(data)


def _write_json(content: dict, path: str, indent: int | None = None) -> None:
    with open(path, 'w', encoding='utf-8') as file:
        json.dump(content, file, indent=indent)


def _read_stamp(root: str) -> dict | None:
    """The stamp of a set that this module wrote, or None."""
    try:
        with open(osp.join(root, STAMP), encoding='utf-8') as file:
            stamp = json.load(file)
    except (OSError, ValueError):
        return None
    ours = isinstance(stamp, dict) and stamp.get('generator') == FORMAT['generator']
    return stamp if ours else None


def _is_complete(root: str, parameters: dict) -> bool:
    """Whether ``root`` holds the set with these parameters and none of its files is missing."""
    if _read_stamp(root) != dict(FORMAT, parameters=parameters):
        return False
    scenes = parameters['num_train'] + parameters['num_val']
    # Two images and a label map of each scene, two annotation files, and the stamp.
    return sum(len(files) for _, _, files in os.walk(root)) == 3 * scenes + 3


def _check_space(folder: str, pixels: int) -> None:
    check_writable(folder)
    os.makedirs(folder, exist_ok=True)
    free = shutil.disk_usage(folder).free
    # A JPEG of photographs has about half a byte a pixel, and there are two of each.
    if pixels > free:
        raise OSError(
            f'no space for the demo set: it takes about {pixels / 1e9:.1f} GB, and {folder} has '
            f'{free / 1e9:.1f} GB'
        )


def _move_into_place(finished: str, root: str, parameters: dict) -> None:
    """Rename ``finished`` to ``root``; a set that is there is moved away first."""
    old = finished + '.old'
    try:
        if osp.isdir(root):
            os.rename(root, old)
        os.rename(finished, root)
    except OSError:
        # Another process may have written the same set meanwhile.
        if not _is_complete(root, parameters):
            raise
    finally:
        if osp.isdir(old):
            if not osp.isdir(root):
                os.rename(old, root)
            shutil.rmtree(old, ignore_errors=True)
