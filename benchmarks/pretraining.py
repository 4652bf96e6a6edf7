r"""Detectors and segmentors with channel-idle FFNs from pretrained weights of several origins.

For each seed a small Swin learns to classify crops of objects, once as an ordinary model and once
as a RePaFormer, for equally long. From these weights a detector or segmentor trains on other scenes
in each of the :data:`WAYS`, for equally long, and is tested, RePaFormers in their deploy form::

    python -m benchmarks.pretraining --clothes data/debian/usr/share/datasets/fashion-mnist \
        --photographs data/debian/usr/share/backgrounds --jobs 9

The two folders are those of :mod:`benchmarks.objects`. With ``--jobs``, each task and seed is a
process. Rows are appended as they come to a file with the columns of results.csv, and a table of
them comes at the end. ``--small`` takes the same way with little of everything.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.config import Config, DictAction
from mmengine.registry import DATASETS, MODELS, init_default_scope

from benchmarks.compare import append, percent
from benchmarks.narrower import IDLE_RATIO, schedule
from benchmarks.objects import read_clothes, read_photographs, write_clothes
from benchmarks.tables import COLUMNS, listed, mean, read, table
from demo.dataset import write_digit_scenes
from demo.run import test, train
from repa_mm import config_path, convert_pretrained
from repa_mm.convert.training_form import NORM
from repa_mm.io.configs import load_config

# Name in results.csv, config, kind of objects, and folder of its layout.
TASKS = {
    'clothes': ('RetinaNet, clothes', 'demo/retinanet_swin_clothes.py', 'clothes', 'coco'),
    'digits': ('RetinaNet, digits', 'demo/retinanet_swin_digits.py', 'digits', 'coco'),
    'upernet': ('UperNet, digits', 'demo/upernet_swin_digits.py', 'digits', 'ade'),
    'mask_rcnn': ('Mask R-CNN, digits', 'demo/mask_rcnn_swin_digits.py', 'digits', 'coco'),
}
REPA = dict(type='RePaSwinTransformer', idle_ratio=IDLE_RATIO)
# Form in results.csv, weights, and what changes in the backbone; those that matter most come first.
WAYS = {
    'repa': ('channel idle, pretrained as such', 'repa', REPA),
    'fitted': ('channel idle, fitted', 'fitted', dict(REPA, ffn_norm_cfg=NORM)),
    'stock': ('stock', 'stock', {}),
    'copied': ('channel idle, copied', 'stock', REPA),
}


class Scale(NamedTuple):
    """Numbers of scenes (for each of both trainings, for tests), iterations and images."""

    scenes: int = 1200
    val: int = 200
    classify: int = 300
    crops: int = 64  # in a batch of the classification
    fit: int = 1024  # crops that channel-idle FFNs are fitted to
    iterations: int = 250
    batch: int = 16


SMALL = dict(scenes=16, val=4, classify=2, crops=8, fit=64, iterations=2, batch=4)
SIZE = 80  # of a crop in pixels
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # as in the configs
COMMAND = 'python -m benchmarks.pretraining'


@DATASETS.register_module()
class InMemory(torch.utils.data.Dataset):
    """A data set whose pipeline is not random, read once."""

    read: dict[str, tuple] = {}

    def __init__(self, dataset: dict) -> None:
        key = str(dataset)
        if key not in self.read:
            found = DATASETS.build(dataset)
            items = [found[i] for i in range(len(found))]
            self.read[key] = found.metainfo, found.get_data_info, items
        self.metainfo, self.get_data_info, self.items = self.read[key]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict:
        return self.items[index]


def write_scenes(args: argparse.Namespace, kind: str) -> None:
    """Write the scenes of all trainings with one kind of objects."""
    root, counts = f'{args.data}/{kind}', dict(train=2 * args.scale.scenes, val=args.scale.val)
    if kind == 'digits':
        write_digit_scenes(root, *counts.values())
    elif not os.path.isdir(root):
        clothes, photographs = read_clothes(args.clothes), read_photographs(args.photographs)
        write_clothes(root, clothes, photographs, counts)


def read_crops(
    root: str, split: str, skip: int = 0, repeats: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Squares around the objects of scenes, uint8 (N, 3, 80, 80) in RGB, and labels (N, )."""
    found = json.loads(Path(root, f'coco/annotations/instances_{split}2017.json').read_text())
    names = {image['id']: image['file_name'] for image in found['images'][skip:]}
    scenes = {i: cv2.imread(f'{root}/coco/{split}2017/{name}') for i, name in names.items()}
    things = [thing for thing in found['annotations'] if thing['image_id'] in scenes]
    rng, crops = np.random.default_rng(0), []
    for thing in repeats * things:
        sides = np.array(thing['bbox'][2:])
        zoom = SIZE / (sides.max() * rng.uniform(1.1, 2))
        centre = thing['bbox'][:2] + sides * rng.uniform(0.3, 0.7, 2)
        matrix = np.column_stack([zoom * np.eye(2), SIZE / 2 - zoom * centre])
        scene = scenes[thing['image_id']]
        crop = cv2.warpAffine(scene, matrix, (SIZE, SIZE), borderMode=cv2.BORDER_REFLECT)
        crops.append(crop[..., ::-1].transpose(2, 0, 1))
    labels = repeats * [thing['category_id'] - 1 for thing in things]
    return torch.from_numpy(np.stack(crops)), torch.tensor(labels)


class Run:
    """The trainings of one task and seed."""

    def __init__(self, task: str, seed: int, args: argparse.Namespace) -> None:
        self.name, self.config, kind, self.layout = TASKS[task]
        self.seed, self.args, self.scale = seed, args, args.scale
        self.root, self.folder = f'{args.data}/{kind}', Path(args.work_dir, f'{task}_{seed}')
        self.folder.mkdir(parents=True, exist_ok=True)
        init_default_scope('mmdet')
        # Not of the scenes that the detector trains with.
        self.crops, self.labels = read_crops(self.root, 'train', args.scale.scenes, repeats=3)

    def load(self) -> Config:
        options = {'model.backbone.arch.depths': [1, 1, 1, 1]} if self.args.small else {}
        return load_config(config_path(self.config), options)

    def normalized(self, crops: torch.Tensor) -> torch.Tensor:
        crops = crops.to(self.args.device).float()
        mean, std = (crops.new_tensor(x).view(3, 1, 1) for x in (MEAN, STD))
        return (crops - mean) / std

    def classifier(self, name: str) -> nn.Module:
        """Train a backbone to classify crops."""
        torch.manual_seed(self.seed)
        cfg = self.load().model.backbone
        cfg.update(WAYS[name][2], out_indices=(3,))
        backbone, head = MODELS.build(cfg), nn.Linear(8 * cfg.arch.embed_dims, 10)
        backbone.init_weights()
        model = nn.ModuleList([backbone, head]).to(self.args.device)

        def logits(crops: torch.Tensor) -> torch.Tensor:
            return head(backbone(self.normalized(crops))[-1].mean((2, 3)))

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
        rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, self.scale.classify)
        for _ in range(self.scale.classify):
            index = torch.randint(len(self.labels), (self.scale.crops,))
            target = self.labels[index].to(self.args.device)
            loss = F.cross_entropy(logits(self.crops[index]), target, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rate.step()
        model.eval()
        crops, labels = read_crops(self.root, 'val')
        with torch.no_grad():
            found = torch.cat([logits(part).argmax(1).cpu() for part in crops.split(64)])
        print(f'{name}: {100 * (found == labels).float().mean():.1f} % of the crops', flush=True)
        return backbone

    def pretrained(self, name: str) -> str:
        """Path of the weights of a name in :data:`WAYS`, which are made unless they are there."""
        path = self.folder / f'{name}.pth'
        if path.exists():
            return str(path)
        if name == 'fitted':
            start = self.load().model.backbone
            start.update(out_indices=(3,))
            backbone = MODELS.build(start).to(self.args.device)
            backbone.load_state_dict(torch.load(self.pretrained('stock'))['state_dict'])
            backbone.eval()
            chosen = torch.randperm(len(self.crops))[: self.scale.fit]
            batches = [self.normalized(part) for part in self.crops[chosen].chunk(4)]
            backbone, report = convert_pretrained(backbone, batches, idle_ratio=IDLE_RATIO)
            print(report, flush=True)
        else:
            backbone = self.classifier(name)
        torch.save(dict(state_dict=backbone.state_dict()), path)
        return str(path)

    def way(self, name: str) -> None:
        """Train and test in one way."""
        (form, weights, changes), steps = WAYS[name], self.scale.iterations
        cfg = schedule(self.load(), steps, self.seed)
        cfg.default_hooks.logger.interval = min(10, steps)
        init_cfg = dict(type='Pretrained', checkpoint=self.pretrained(weights))
        cfg.model.backbone.update(changes, init_cfg=init_cfg)
        root = f'{self.root}/{self.layout}/'
        data = dict(cfg.train_dataloader.dataset, data_root=root, indices=self.scale.scenes)
        cfg.train_dataloader.dataset = dict(type='InMemory', dataset=data)
        cfg.train_dataloader.batch_size = self.scale.batch
        cfg.test_dataloader.batch_size = min(50, self.scale.val)
        cfg.test_dataloader.dataset.data_root = root
        if self.layout == 'coco':
            cfg.test_evaluator.ann_file = f'{root}annotations/instances_val2017.json'
        cfg.val_dataloader = cfg.val_evaluator = cfg.val_cfg = None
        gpu = self.args.device != 'cpu'
        if gpu:  # weights without decay are groups of their own, with a launch each
            cfg.optim_wrapper.optimizer.fused = True
        folder = self.folder / name
        trained = train(cfg, str(folder))
        for key in ('time', 'memory'):  # seconds, and MB of a GPU
            print(f'{name}: {key} {logged(folder, key):.3g}', flush=True)
        found, _ = test(cfg, trained, bool(changes), str(self.folder / 'test' / folder.name))
        row = dict(what='after pretraining', model=self.name, form=form, run=f'seed {self.seed}')
        cpu = torch.cuda.get_device_name() if gpu else ''
        append(self.args.out, dict(row, cpu=cpu, command=COMMAND), percent(found))


def logged(folder: Path, key: str) -> float:
    """Median of a value in the log of the last training in a folder."""
    logs = sorted(folder.glob('*/vis_data/scalars.json'))[-1:]
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    return float(np.median([line[key] for line in lines if key in line] or np.nan))


def start(task: str, seed: int, args: argparse.Namespace) -> None:
    """Run a task and seed in a process, with a log file in the work folder."""
    command = [sys.executable, *COMMAND.split()[1:], *sys.argv[1:], '--tasks', task]
    command += ['--seeds', str(seed), '--jobs', '1']
    log = Path(args.work_dir, f'{task}_{seed}.log')
    with log.open('w') as file:
        env = dict(os.environ, OMP_NUM_THREADS='1')
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=env).returncode
    print(f'{task}, seed {seed}: status {code}', '\n' + log.read_text()[-1500:] if code else '')


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--clothes', default='/usr/share/datasets/fashion-mnist')
    parser.add_argument('--photographs', default='/usr/share/backgrounds')
    parser.add_argument('--tasks', nargs='+', choices=TASKS, default=[*TASKS])
    parser.add_argument('--seeds', type=int, nargs='*', default=[0, 1, 2], help='none: the table')
    parser.add_argument('--ways', nargs='+', choices=WAYS, default=[*WAYS])
    parser.add_argument('--jobs', type=int, default=1, help='processes at once')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--small', action='store_true')
    parser.add_argument('--scale', nargs='+', action=DictAction, default={}, help='iterations=…')
    parser.add_argument('--data', default='data/pretraining')
    parser.add_argument('--work-dir', default='work_dirs/pretraining')
    parser.add_argument('--out', default='work_dirs/pretraining.csv')
    args = parser.parse_args()
    args.scale = Scale(**(SMALL if args.small else {}) | args.scale)
    for folder in (args.work_dir, Path(args.out).parent):
        os.makedirs(folder, exist_ok=True)
    if not os.path.exists(args.out):  # or several processes would write the header
        Path(args.out).write_text(','.join(COLUMNS) + '\n')
    with ThreadPoolExecutor(args.jobs) as pool:
        for task in args.tasks if args.seeds else ():
            write_scenes(args, TASKS[task][2])
            for seed in args.seeds:
                if args.jobs > 1:
                    pool.submit(start, task, seed, args)
                    continue
                run = Run(task, seed, args)
                for way in args.ways:
                    run.way(way)
    forms = [form for form, *_ in WAYS.values()]

    def order(row: dict) -> tuple:
        return row['model'], forms.index(row['form']), row['run']

    rows = sorted(read(args.out), key=order)
    print(table(rows, 'model of form', extra={'mean': mean, 'by seed': listed}))


if __name__ == '__main__':
    main()
