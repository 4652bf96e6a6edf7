r"""Write scenes of clothes on photographs, a harder set than the demo's digits.

Ten kinds of clothes in random colours, whose 70000 grey pictures of 28x28 pixels are Fashion-MNIST
(Xiao et al., arXiv 1708.07747), lie on photographs; some kinds are hard to tell apart. Both come
from packages of Debian 12::

    apt-get download dataset-fashion-mnist mate-backgrounds \
        lomiri-wallpapers-16.04 lomiri-wallpapers-20.04
    mkdir -p data/debian && for package in *.deb; do dpkg -x $package data/debian; done
    python -m benchmarks.objects --clothes data/debian/usr/share/datasets/fashion-mnist \
        --photographs data/debian/usr/share/backgrounds
    python tools/train.py configs/demo/retinanet_swin_clothes.py

Training and validation share neither a picture nor a photograph.
"""

import argparse
import gzip
import os.path as osp
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from demo.dataset import Rng, compose_scene, upsample, write_scenes

# In the order of the labels.
CLOTHES = (
    *('T-shirt', 'trousers', 'pullover', 'dress', 'coat'),
    *('sandal', 'shirt', 'sneaker', 'bag', 'ankle boot'),
)
DESCRIPTION = dict(
    info=dict(description='Clothes on photographs', version='1.0', year=2017),
    licenses=[dict(id=1, name="MIT (clothes); the photograph's own", url='')],
    categories=[
        dict(supercategory='clothes', id=i, name=name) for i, name in enumerate(CLOTHES, 1)
    ],
)
NOT_BACKGROUND = 32  # pixels of at least this grey value, of 255, are opaque
DARKEST = 0.3  # brightness of black cloth, as a share of that of white cloth
VAL_PHOTOGRAPHS = 0.2  # share of the photographs that only validation scenes use
WIDTH = 3  # of a photograph, in sizes of the largest scene, before squares are cut from it


def read_clothes(folder: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Pictures (N, 28, 28) and labels (N,), uint8, of 'train' and 'val'."""

    def values(name: str, header: int) -> np.ndarray:
        with gzip.open(osp.join(folder, f'{name}-ubyte.gz')) as file:
            return np.frombuffer(file.read(), np.uint8, offset=header)

    return {
        split: (
            values(f'{name}-images-idx3', 16).reshape(-1, 28, 28),
            values(f'{name}-labels-idx1', 8),
        )
        for split, name in (('train', 'train'), ('val', 't10k'))
    }


def read_photographs(folder: str, size: int = 160) -> dict[str, list[tuple[str, int, np.ndarray]]]:
    """The JPEG files of 'train' and 'val', for scenes of a size: name, licence, BGR pixels."""
    found = []
    for path in sorted(Path(folder).rglob('*.jpg')):
        pixels = cv2.imread(str(path))
        width = WIDTH * size
        height = round(pixels.shape[0] * width / pixels.shape[1])
        pixels = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA)
        found.append((path.relative_to(folder).as_posix(), 1, pixels))
    # The first ones and not every fifth: one photograph in two sizes has names that are neighbours.
    num_val = round(len(found) * VAL_PHOTOGRAPHS)
    return dict(train=found[num_val:], val=found[:num_val])


def write_clothes(
    root: str,
    clothes: dict[str, tuple[np.ndarray, np.ndarray]],
    photographs: dict[str, list[tuple[str, int, np.ndarray]]],
    counts: dict[str, int],
    size: int = 160,
) -> None:
    """Write scenes of a size in pixels, unless ``root`` exists.

    ``clothes`` and ``photographs`` are what the readers return.
    """
    indices = {
        split: [np.flatnonzero(labels == label) for label in range(len(CLOTHES))]
        for split, (_, labels) in clothes.items()
    }

    def compose(rng: Rng, split: str) -> dict[str, Any]:
        def load(index: int) -> tuple[np.ndarray, np.ndarray]:
            # All shoes point to the left: every other picture is mirrored.
            grey = clothes[split][0][index][:, :: (1, -1)[index % 2]].astype(np.float32)
            opacity = upsample((grey / NOT_BACKGROUND).clip(0, 1))
            return opacity, DARKEST + (1 - DARKEST) * upsample(grey / 255)

        return compose_scene(rng, load, indices[split], photographs[split], size, saturation=255)

    write_scenes(root, counts, compose, DESCRIPTION)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--clothes', default='/usr/share/datasets/fashion-mnist')
    parser.add_argument('--photographs', default='/usr/share/backgrounds')
    parser.add_argument('--out', default='data/clothes')
    parser.add_argument('--train', type=int, default=4000, help='number of scenes')
    parser.add_argument('--val', type=int, default=500, help='number of scenes')
    args = parser.parse_args()
    write_clothes(
        args.out,
        read_clothes(args.clothes),
        read_photographs(args.photographs),
        dict(train=args.train, val=args.val),
    )


if __name__ == '__main__':
    main()
