"""Handwritten digits on photographs: a detection and segmentation data set without a download.

The digits are the 1797 real 8x8 scans of ``sklearn.datasets.load_digits`` (UCI, Optical Recognition
of Handwritten Digits). The backgrounds are photographs from the wheels of scikit-learn and
scikit-image. Training and validation share neither a scan nor a part of a photograph.
"""

import json
import os
import os.path as osp
import shutil
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import cv2
import numpy as np

DIGITS = ('zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine')

# Package, file in the package's wheel, id of the licence.
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
# The part of the annotation files that does not depend on the scenes.
DESCRIPTION = dict(
    info=dict(
        description='Handwritten digits on photographs',
        url='',
        version='1.0',
        year=2017,
        contributor='scikit-learn, scikit-image',
        date_created='2017/09/01',
    ),
    licenses=LICENSES,
    categories=[dict(supercategory='digit', id=i, name=name) for i, name in enumerate(DIGITS, 1)],
)

TRAIN_SHARE = 0.7  # left part of each photograph; the rest is for validation
VAL_SCANS = 0.2  # share of each digit's scans that only validation scenes use
UPSAMPLE = 8  # an object is interpolated to 8 times its size before it is placed
BACKGROUND = 0.8, 1.6  # shares of the size: sides of the squares that become backgrounds
INK = 0.5  # an object is where the opacity is larger
Rng = np.random.Generator
LUMA = np.array([0.114, 0.587, 0.299], np.float32)  # brightness of a BGR colour


def write_digit_scenes(
    root: str, num_train: int = 1200, num_val: int = 200, size: int = 160
) -> None:
    """Write scenes of two to six digits on photographs, in two layouts, unless ``root`` exists.

    ``root/coco`` has the layout of COCO 2017 (boxes and instance masks, as uncompressed RLE since
    digits have holes). ``root/ade`` has the layout of ADE20K's ``ADEChallengeData2016`` (label
    maps: 0 unlabelled, 1 background, 2 to 11 the digits 0 to 9). Both have the same images. The
    same arguments and library versions give the same bytes.

    Args:
        root (str): Folder of the data set, which appears when the data set is complete.
        num_train (int): Number of training scenes. Defaults to 1200.
        num_val (int): Number of validation scenes. Defaults to 200.
        size (int): Width and height of a scene in pixels. Digits are ``size / 8`` to
            ``size * 3 / 8`` pixels tall. Defaults to 160.
    """
    scans, labels = _load_scans()
    photographs = [
        (osp.basename(file), license_id, load_photograph(package, file))
        for package, file, license_id in PHOTOGRAPHS
    ]
    splits = _split_scans(labels)
    shade = np.ones_like(scans[0])

    def compose(rng: Rng, split: str) -> dict[str, Any]:
        sides = [(n, license_id, _side(p, split)) for n, license_id, p in photographs]
        return compose_scene(rng, lambda scan: (scans[scan], shade), splits[split], sides, size)

    write_scenes(root, dict(train=num_train, val=num_val), compose, DESCRIPTION)


def write_scenes(
    root: str,
    counts: dict[str, int],
    compose: Callable[[Rng, str], dict[str, Any]],
    description: dict[str, Any],
) -> None:
    """Write scenes in the layouts of COCO and ADE20K, unless ``root`` exists.

    Args:
        root (str): Folder of the data set, which appears when the data set is complete.
        counts (dict): Number of scenes of 'train' and of 'val'.
        compose (Callable): Called with a random number generator for the scene and the name of the
            split, returns a scene as from :func:`compose_scene`.
        description (dict): ``info``, ``licenses`` and ``categories`` of the annotation files.
    """
    if osp.isdir(root):
        return
    unfinished = osp.normpath(root) + '.unfinished'
    shutil.rmtree(unfinished, ignore_errors=True)
    first_id = 1
    for split, count in counts.items():
        rngs = (np.random.default_rng([0, int(split == 'val'), i]) for i in range(count))
        scenes = (compose(rng, split) for rng in rngs)
        _write_split(unfinished, split, scenes, first_id, description)
        first_id += count
    os.replace(unfinished, root)


def load_photograph(package: str, file: str) -> np.ndarray:
    """Read a photograph from a package, as BGR pixels (height, width, 3).

    Args:
        package (str): 'sklearn' or 'skimage'.
        file (str): Path inside the package.
    """
    return cv2.imread(osp.join(osp.dirname(import_module(package).__file__), file))


def _load_scans() -> tuple[np.ndarray, np.ndarray]:
    """Return the scans, (N, 80, 80) in [0, 1], enlarged and with an empty margin, and labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return np.stack([upsample(i) for i in digits.images / 16]), digits.target


def upsample(values: np.ndarray) -> np.ndarray:
    """Pad a map (H, W) in [0, 1] by a pixel and enlarge it smoothly to (8H + 16, 8W + 16)."""
    values = np.pad(values.astype(np.float32), 1)
    sides = UPSAMPLE * values.shape[1], UPSAMPLE * values.shape[0]
    return cv2.resize(values, sides, interpolation=cv2.INTER_CUBIC).clip(0, 1)


def _split_scans(labels: np.ndarray) -> dict[str, list[np.ndarray]]:
    """Return the indices of each digit's scans for training and for validation."""
    rng = np.random.default_rng([0])
    splits: dict[str, list[np.ndarray]] = dict(train=[], val=[])
    for digit in range(len(DIGITS)):
        indices = rng.permutation(np.flatnonzero(labels == digit))
        num_val = round(len(indices) * VAL_SCANS)
        splits['val'].append(indices[:num_val])
        splits['train'].append(indices[num_val:])
    return splits


def compose_scene(
    rng: Rng,
    load: Callable[[int], tuple[np.ndarray, np.ndarray]],
    indices: list[np.ndarray],
    photographs: list[tuple[str, int, np.ndarray]],
    size: int,
    saturation: float = 110,
) -> dict[str, Any]:
    """Compose a scene of two to six objects that do not hide one another.

    Args:
        rng (numpy.random.Generator): The random number generator.
        load (Callable): Called with the index of an object, returns its opacity and shade, both
            (H, W) in [0, 1].
        indices (list[numpy.ndarray]): Indices of the objects of each class.
        photographs (list): Name, id of the licence and BGR pixels of each background.
        size (int): Width and height of the scene in pixels.
        saturation (float): Largest saturation of an object's colour, up to 255. Defaults to 110,
            which is pale.

    Returns:
        dict: ``image`` (size, size, 3) in BGR, ``objects`` (dicts with a ``category`` from 0, the
        object's index ``scan`` and its ``mask``), ``photograph`` (a name) and ``license`` (an id).
    """
    name, license_id, photograph = photographs[rng.integers(len(photographs))]
    image = _background(rng, photograph, size)
    objects: list[dict] = []
    taken = np.zeros((size, size), bool)
    for _ in range(rng.integers(2, 7)):
        category = int(rng.integers(len(indices)))
        scan = int(rng.choice(indices[category]))
        opacity, shade = load(scan)
        length = rng.uniform(size / 6, size * 3 / 8)
        placed = None
        # A smaller object may fit where a larger one does not.
        while placed is None and length >= size / 8:
            placed = _place(rng, opacity, shade, length, taken)
            length *= 0.8
        if placed is None:
            continue
        alpha, shade, (top, left) = placed
        window = np.s_[top : top + alpha.shape[0], left : left + alpha.shape[1]]
        colour = shade[..., None] * _ink_colour(rng, image[window], saturation)
        image[window] += alpha[..., None] * (colour - image[window])
        mask = np.zeros((size, size), bool)
        mask[window] = alpha >= 0.5
        objects.append(dict(category=category, scan=scan, mask=mask))
        taken |= mask
    image = image.round().clip(0, 255).astype(np.uint8)
    return dict(image=image, objects=objects, photograph=name, license=license_id)


def _side(photograph: np.ndarray, split: str) -> np.ndarray:
    """Return the part of a photograph that a split takes its backgrounds from."""
    border = round(photograph.shape[1] * TRAIN_SHARE)
    return photograph[:, :border] if split == 'train' else photograph[:, border:]


def _background(rng: Rng, photograph: np.ndarray, size: int) -> np.ndarray:
    """Return a random square of a photograph, (size, size, 3) in float32."""
    least, most = (round(share * size) for share in BACKGROUND)
    side = min(int(rng.integers(least, most + 1)), *photograph.shape[:2])
    top = rng.integers(photograph.shape[0] - side + 1)
    left = rng.integers(photograph.shape[1] - side + 1)
    crop = photograph[top : top + side, left : left + side]
    if rng.random() < 0.5:
        crop = crop[:, ::-1]
    crop = cv2.resize(
        np.ascontiguousarray(crop),
        (size, size),
        interpolation=cv2.INTER_AREA if side > size else cv2.INTER_CUBIC,
    )
    # Dimmed, so that the bright objects stand out.
    return crop.astype(np.float32) * np.float32(rng.uniform(0.45, 0.65))


def _place(
    rng: Rng, opacity: np.ndarray, shade: np.ndarray, length: float, taken: np.ndarray
) -> tuple[np.ndarray, np.ndarray, tuple[int, int]] | None:
    """Return an object's opacity, shade and a free place (top, left) for it; None without one."""
    alpha, shade = _warp(rng, opacity, shade, length)
    h, w = alpha.shape
    if h > taken.shape[0] or w > taken.shape[1]:
        return None
    body = alpha >= 0.5
    for _ in range(40):
        top = int(rng.integers(taken.shape[0] - h + 1))
        left = int(rng.integers(taken.shape[1] - w + 1))
        # Objects never cover each other, but their boxes may overlap a little.
        under = taken[top : top + h, left : left + w]
        if under.sum() <= 0.03 * h * w and not (under & body).any():
            return alpha, shade, (top, left)
    return None


def _warp(
    rng: Rng, ink: np.ndarray, shade: np.ndarray, length: float
) -> tuple[np.ndarray, np.ndarray]:
    """Scale an object to ``length`` pixels, rotate and shear it a little; crop it to its body."""
    body = ink > INK
    scale = length / max(np.ptp(np.flatnonzero(body.any(axis))) + 1 for axis in (0, 1))
    angle = np.deg2rad(rng.uniform(-8, 8))
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    shear = np.array([[1, rng.uniform(-0.1, 0.1)], [0, 1]])
    matrix = scale * turn @ shear
    canvas = int(np.ceil(ink.shape[0] * scale * 1.5))
    shift = canvas / 2 - matrix @ (np.array(ink.shape[::-1]) / 2)
    matrix = np.column_stack([matrix, shift])
    warped, shade = (cv2.warpAffine(m, matrix, (canvas, canvas)) for m in (ink, shade))
    # Keeps the edge about two pixels wide at any scale.
    steepness = UPSAMPLE * scale / 2
    alpha = ((warped - INK) * steepness + 0.5).clip(0, 1)
    rows, cols = np.flatnonzero((alpha >= 0.5).any(1)), np.flatnonzero((alpha >= 0.5).any(0))
    window = np.s_[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]
    return alpha[window], shade[window]


def _ink_colour(rng: Rng, under: np.ndarray, saturation: float) -> np.ndarray:
    """Return a random bright BGR colour with a high contrast to the pixels under the object."""
    brightness = under.reshape(-1, 3) @ LUMA
    best, best_contrast = None, -1.0
    for _ in range(16):
        # Hue, saturation and value.
        hsv = [rng.uniform(0, 180), rng.uniform(0, saturation), rng.uniform(215, 255)]
        colour = cv2.cvtColor(np.array([[hsv]]).astype(np.uint8), cv2.COLOR_HSV2BGR)
        colour = colour[0, 0].astype(np.float32)
        # A low percentile instead of the mean: on a striped background, a colour can be far from
        # the mean and equal to one of the stripes.
        contrast = float(np.percentile(abs(brightness - colour @ LUMA), 20))
        if contrast > best_contrast:
            best, best_contrast = colour, contrast
        if contrast >= 80:
            break
    return best


def _write_split(
    root: str, split: str, scenes: Iterable[dict], first_id: int, description: dict[str, Any]
) -> None:
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
        for n, thing in enumerate(scene['objects']):
            mask = thing['mask']
            annotations.append(
                dict(
                    segmentation=_encode(mask),
                    area=int(mask.sum()),
                    iscrowd=0,
                    image_id=image_id,
                    bbox=list(cv2.boundingRect(mask.astype(np.uint8))),
                    category_id=thing['category'] + 1,
                    id=10 * image_id + n,
                    scan=thing['scan'],
                )
            )
            label_map[mask] = thing['category'] + 2
        name = f'ADE_{split}_{number:08d}'
        for path in (osp.join(coco, file_name), osp.join(ade_images, f'{name}.jpg')):
            cv2.imwrite(path, scene['image'], [cv2.IMWRITE_JPEG_QUALITY, 95])
        cv2.imwrite(osp.join(ade_labels, f'{name}.png'), label_map)

    content = dict(description, images=images, annotations=annotations)
    with open(osp.join(coco_annotations, f'instances_{split}2017.json'), 'w') as file:
        json.dump(content, file)


def _encode(mask: np.ndarray) -> dict[str, list[int]]:
    """Encode a mask (H, W) as COCO's uncompressed RLE: by columns, the first run is background."""
    flat = np.concatenate([[0], mask.ravel(order='F').astype(np.int8), [0]])
    runs = np.diff(np.concatenate([[0], np.flatnonzero(np.diff(flat)), [mask.size]]))
    return dict(counts=runs.tolist(), size=list(mask.shape))
