r"""Detectors and segmentors with channel-idle FFNs from pretrained weights of several origins.

For each seed a small Swin learns to classify crops of objects, once as an ordinary model and once
as a RePaFormer, for equally long. From these weights a detector or segmentor trains on other scenes
in each of the :data:`WAYS`, for equally long, and is tested, RePaFormers in their deploy form::

    python -m benchmarks.pretraining --clothes data/debian/usr/share/datasets/fashion-mnist \
        --photographs data/debian/usr/share/backgrounds --jobs 9

The two folders are those of :mod:`benchmarks.objects`. Each task and seed is a process, and
``--jobs`` of them run at once. Each appends its rows to a file with the columns of results.csv as
they come. A table of the rows comes at the end. ``--small`` takes the same way with little of
everything.
"""

import argparse
import functools
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import cv2
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.registry import DATASETS, MODELS, init_default_scope

import demo.dataset
from benchmarks import objects
from benchmarks.compare import METRICS, append
from benchmarks.narrower import IDLE_RATIO, schedule
from benchmarks.tables import COLUMNS, Row, difference, grouped, listed, mean, read, table
from demo.run import test, train
from repa_mm import config_path
from repa_mm.convert import fit_channel_idle
from repa_mm.convert.training_form import NORM
from repa_mm.io.configs import load_config


class Task(NamedTuple):
    """A model: its name in results.csv, config, and kind of objects."""

    name: str
    config: str
    objects: str


TASKS = {
    'clothes': Task('RetinaNet, clothes', 'demo/retinanet_swin_clothes.py', 'clothes'),
    'digits': Task('RetinaNet, digits', 'demo/retinanet_swin_digits.py', 'digits'),
    'upernet': Task('UperNet, digits', 'demo/upernet_swin_digits.py', 'digits'),
}
REPA = dict(type='RePaSwinTransformer', idle_ratio=IDLE_RATIO)
# The form in results.csv, the weights, and what changes in the backbone.
WAYS = {
    'repa': ('channel idle, pretrained as such', 'repa', REPA),
    'fitted': ('channel idle, fitted', 'fitted', dict(REPA, ffn_norm_cfg=NORM)),
    'vanilla': ('vanilla', 'vanilla', {}),
    'filled': ('channel idle, filled', 'vanilla', REPA),
}


class Scale(NamedTuple):
    """Numbers of scenes (for each kind of training, and for tests), iterations and images."""

    scenes: int = 1200
    val: int = 200
    crops: int = 64  # in a batch of the classification
    classify: int = 500
    batch: int = 16
    iterations: int = 400
    fit: int = 1024  # crops that channel-idle FFNs are fitted to


SMALL = Scale(scenes=16, val=4, crops=8, classify=2, batch=4, iterations=2, fit=64)
SIZE = 80  # of a crop in pixels


@DATASETS.register_module()
class InMemory(torch.utils.data.Dataset):
    """A data set whose pipeline is not random, read once."""

    def __init__(self, dataset: dict) -> None:
        self.dataset = DATASETS.build(dataset)
        self.metainfo, self.get_data_info = self.dataset.metainfo, self.dataset.get_data_info
        self.items = [self.dataset[i] for i in range(len(self.dataset))]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict:
        item = self.items[index]
        return dict(item, data_samples=item['data_samples'].clone())


def write_scenes(args: argparse.Namespace, kind: str) -> None:
    """Write the scenes of all trainings of one kind of objects, with all cores."""
    root, scale = f'{args.data}/{kind}', args.scale
    write, counts = demo.dataset.write_scenes, dict(train=2 * scale.scenes, val=scale.val)

    def in_parallel(root: str, counts: dict, compose: Callable, description: dict) -> None:
        fork = multiprocessing.get_context('fork')
        with fork.Pool(initializer=COMPOSE.append, initargs=(compose,)) as pool:
            indices = [(split, i) for split, number in counts.items() for i in range(number)]
            scenes = pool.imap(compose_one, indices, 8)
            write(root, counts, lambda *_: next(scenes), description)

    if os.path.isdir(root):
        return
    cv2.setNumThreads(0)  # its threads do not survive a fork
    if kind == 'digits':
        with mock.patch.object(demo.dataset, 'write_scenes', in_parallel):
            demo.dataset.write_digit_scenes(root, *counts.values())
    else:
        clothes = objects.read_clothes(args.clothes)
        photographs = objects.read_photographs(args.photographs)
        with mock.patch.object(objects, 'write_scenes', in_parallel):
            objects.write_clothes(root, clothes, photographs, counts)


COMPOSE: list[Callable] = []  # in a process that composes scenes


def compose_one(index: tuple[str, int]) -> dict[str, Any]:
    split, i = index
    return COMPOSE[-1](np.random.default_rng([0, int(split == 'val'), i]), split)


def crops(root: str, split: str, skip: int, repeats: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Squares around the objects of scenes, uint8 (N, 3, 80, 80) in RGB, and labels (N, )."""
    found = json.loads(Path(root, f'coco/annotations/instances_{split}2017.json').read_text())
    folder = Path(root, f'coco/{split}2017')
    files = {image['id']: str(folder / image['file_name']) for image in found['images'][skip:]}
    scenes = {i: cv2.imread(file)[..., ::-1] for i, file in files.items()}
    rng, pixels, labels = np.random.default_rng(0), [], []
    for thing in repeats * [one for one in found['annotations'] if one['image_id'] in scenes]:
        x, y, *sides = thing['bbox']
        zoom = SIZE / (max(sides) * rng.uniform(1.1, 2))
        centre = np.array([x, y]) + sides * rng.uniform(0.3, 0.7, 2)
        matrix = np.column_stack([zoom * np.eye(2), SIZE / 2 - zoom * centre])
        image = np.ascontiguousarray(scenes[thing['image_id']])
        square = cv2.warpAffine(image, matrix, (SIZE, SIZE), borderMode=cv2.BORDER_REFLECT)
        pixels.append(square.transpose(2, 0, 1))
        labels.append(thing['category_id'] - 1)
    return torch.from_numpy(np.stack(pixels)), torch.tensor(labels)


class Run:
    """The trainings of one task and seed."""

    def __init__(self, task: str, seed: int, args: argparse.Namespace) -> None:
        self.task, self.seed, self.args, self.scale = TASKS[task], seed, args, args.scale
        self.root = f'{args.data}/{self.task.objects}'
        self.folder = Path(args.work_dir) / f'{task}_{seed}'
        self.folder.mkdir(parents=True, exist_ok=True)
        init_default_scope('mmdet')

    def load(self) -> Config:
        return load_config(config_path(self.task.config), self.args.cfg_options)

    @functools.cached_property
    def images(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The crops to train with, which are not of the scenes that the detector trains with."""
        return crops(self.root, 'train', self.scale.scenes)

    def normalized(self, images: torch.Tensor) -> torch.Tensor:
        norm = self.load().model.data_preprocessor
        mean, std = (torch.tensor(x).view(3, 1, 1) for x in (norm.mean, norm.std))
        return ((images - mean) / std).to(self.args.device)

    def classifier(self, name: str) -> nn.Module:
        """Train a backbone to classify crops, and save its weights."""
        torch.manual_seed(self.seed)
        cfg = self.load().model.backbone
        cfg.update(REPA if name == 'repa' else {}, out_indices=(3,))
        backbone = MODELS.build(cfg)
        backbone.init_weights()
        head = nn.Linear(8 * cfg.arch.embed_dims, 10)
        model = nn.ModuleList([backbone, head]).to(self.args.device)

        def logits(images: torch.Tensor) -> torch.Tensor:
            return head(backbone(self.normalized(images))[-1].mean((2, 3)))

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
        rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, self.scale.classify)
        images, labels = self.images
        for _ in range(self.scale.classify):
            index = torch.randint(len(labels), (self.scale.crops,))
            target = labels[index].to(self.args.device)
            loss = F.cross_entropy(logits(images[index]), target, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rate.step()
        model.eval()
        images, labels = crops(self.root, 'val', 0, repeats=1)
        with torch.no_grad():
            found = torch.cat([logits(part).argmax(1).cpu() for part in images.split(64)])
        print(f'{name}: {100 * (found == labels).float().mean():.1f} % of the crops', flush=True)
        self.save(name, backbone)
        return backbone

    def save(self, name: str, backbone: nn.Module) -> None:
        torch.save(dict(state_dict=backbone.state_dict()), self.folder / f'{name}.pth')

    def pretrain(self, name: str) -> None:
        """Write the weights of a name in :data:`WAYS`, unless they are there."""
        if (self.folder / f'{name}.pth').exists():
            return
        if name != 'fitted':
            self.classifier(name)
            return
        backbone = self.classifier('vanilla')
        images = self.images[0][torch.randperm(len(self.images[0]))[: self.scale.fit]]
        batches = [self.normalized(part) for part in images.split(64)]
        found, report = fit_channel_idle(backbone, batches, IDLE_RATIO, held_out=batches[:1])
        print(report)
        self.save('fitted', found)

    def way(self, name: str) -> None:
        """Train and test in one way."""
        form, weights, changes = WAYS[name]
        self.pretrain(weights)
        cfg, scale = schedule(self.load(), self.scale.iterations, self.seed), self.scale
        checkpoint = str(self.folder / f'{weights}.pth')
        cfg.model.backbone.update(changes, init_cfg=dict(type='Pretrained', checkpoint=checkpoint))
        root = f'{self.root}/{"ade" if "decode_head" in cfg.model else "coco"}/'
        data = dict(cfg.train_dataloader.dataset, data_root=root, indices=scale.scenes)
        cfg.train_dataloader.dataset = dict(type='InMemory', dataset=data)
        cfg.train_dataloader.batch_size = scale.batch
        cfg.test_dataloader.batch_size = min(50, scale.val)
        cfg.test_dataloader.dataset.data_root = root
        if 'ann_file' in cfg.test_evaluator:
            cfg.test_evaluator.ann_file = f'{root}annotations/instances_val2017.json'
        cfg.val_dataloader = cfg.val_evaluator = cfg.val_cfg = None
        trained = train(cfg, str(self.folder / name))
        found, _ = test(cfg, trained, bool(changes), str(self.folder / 'test' / name))
        # A detector that finds nothing has no metric.
        keys = [key for key in METRICS if key in found] or ['coco/bbox_mAP']
        metrics = {METRICS[key][0]: METRICS[key][1] * float(found.get(key, 0)) for key in keys}
        device = self.args.device
        row = dict(
            what='after pretraining',
            model=self.task.name,
            form=form,
            run=f'seed {self.seed}',
            cpu='' if device == 'cpu' else torch.cuda.get_device_name(device),
            command='python -m benchmarks.pretraining',
        )
        append(self.args.out, row, metrics)


def start(task: str, seed: int, args: argparse.Namespace) -> None:
    """Run a task and seed in a process of its own, with a log file."""
    options = ['--tasks', task, '--seeds', str(seed), '--jobs', '1']
    log = Path(args.work_dir) / f'{task}_{seed}.log'
    with open(log, 'w') as file:
        command = [sys.executable, '-m', 'benchmarks.pretraining', *sys.argv[1:], *options]
        env = dict(os.environ, OMP_NUM_THREADS='1')
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=env).returncode
    end = '' if not code else '\n' + log.read_text()[-2000:]
    print(f'{task}, seed {seed}: exit status {code}{end}', flush=True)


def show(path: str) -> None:
    rows = read(path)
    base = grouped(rows, 'model', 'form')

    def minus(rows: list[Row]) -> str:
        reference = base.get((rows[0]['model'], WAYS['repa'][0]), [])
        seeds = {row['run'] for row in reference}
        both = [row for row in rows if row['run'] in seeds]
        return difference(both, reference) if both else ''

    extra = {'mean': mean, 'by seed': listed, 'minus pretrained as such': minus}
    print(table(rows, 'model of form', extra=extra))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--clothes', default='/usr/share/datasets/fashion-mnist')
    parser.add_argument('--photographs', default='/usr/share/backgrounds')
    parser.add_argument('--tasks', nargs='+', choices=TASKS, default=[*TASKS])
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    parser.add_argument('--ways', nargs='+', choices=WAYS, default=[*WAYS])
    parser.add_argument('--jobs', type=int, default=1, help='processes at once')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--small', action='store_true')
    parser.add_argument('--data', default='data/pretraining')
    parser.add_argument('--work-dir', default='work_dirs/pretraining')
    parser.add_argument('--out', default='work_dirs/pretraining.csv')
    args = parser.parse_args()
    args.scale = SMALL if args.small else Scale()
    args.cfg_options = {'model.backbone.arch.depths': [1, 1, 1, 1]} if args.small else {}
    Path(args.work_dir).mkdir(parents=True, exist_ok=True)
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    if not Path(args.out).exists():  # several processes would write it
        Path(args.out).write_text(','.join(COLUMNS) + '\n')
    with ThreadPoolExecutor(args.jobs) as pool:
        for task in args.tasks:
            write_scenes(args, TASKS[task].objects)
            for seed in args.seeds:
                if args.jobs > 1:
                    pool.submit(start, task, seed, args)
                    continue
                run = Run(task, seed, args)
                for way in args.ways:
                    run.way(way)
    if args.jobs > 1:
        show(args.out)


if __name__ == '__main__':
    main()
