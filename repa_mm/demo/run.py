"""The demonstration: data, training, a test in each form, a table and a picture."""

import argparse
import collections
import json
import os
import os.path as osp
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch.nn as nn
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.fileio import load

from repa_mm.demo.report import (
    closing_table,
    compare_detections,
    compare_segmentations,
    read_metrics,
)
from repa_mm.files import check_writable, replacing
from repa_mm.run import FORMS, init_model, load_config
from repa_mm.run.cli import DictAction, clear_errors
from repa_mm.weights import load_checkpoint

# For each task its name in the picture's title, and the metrics of the closing table.
BOX = {'coco/bbox_mAP': 'box AP', 'coco/bbox_mAP_50': 'box AP50'}
MASK = {'coco/segm_mAP': 'mask AP', 'coco/segm_mAP_50': 'mask AP50'}
TASKS = {
    'retinanet': ('RetinaNet', BOX),
    'mask_rcnn': ('Mask R-CNN', BOX | MASK),
    'upernet': ('UPerNet', {'mIoU': 'mIoU (%)', 'aAcc': 'aAcc (%)'}),
}


class StepError(Exception):
    """A command of the demonstration failed; ``status`` is its exit status."""

    def __init__(self, command: str, status: int) -> None:
        super().__init__(f'this command failed with exit status {status}:\n  {command}')
        self.status = status


def run_demo(
    task: str,
    tools: str,
    work_dir: str,
    checkpoint: str | None = None,
    cfg_options: Sequence[str] = (),
) -> dict[str, Any]:
    """Train a small RePa-Swin on the demo data, test both of its forms and compare them.

    The commands that a user would type do all but the comparison; each is printed before it runs.
    ``work_dir`` receives the checkpoints, the predictions of both forms, ``summary.json`` and a
    picture.

    Args:
        task (str): 'retinanet', 'mask_rcnn' or 'upernet'.
        tools (str): Folder of ``train.py`` and ``test.py``; ``configs`` lies beside it.
        work_dir (str): Folder for everything that is written, except the data set (``data/demo``).
        checkpoint (str, optional): A checkpoint in training form to test, instead of training one.
        cfg_options (Sequence[str]): ``key=value`` pairs that override the config, for training and
            tests.

    Returns:
        dict: The content of ``summary.json``.

    Raises:
        StepError: If one of the commands fails.
        FileNotFoundError, CheckpointError: If the checkpoint cannot be read.
        OSError: If ``work_dir`` cannot be written to.
    """
    start = time.perf_counter()
    root = osp.dirname(osp.abspath(tools))
    config = osp.join(root, 'configs', 'demo', f'{task}_repa_swin_digits.py')
    options = ['--cfg-options', *cfg_options] if cfg_options else []
    if checkpoint is not None:
        load_checkpoint(checkpoint)  # before anything is done
    check_writable(work_dir)
    os.makedirs(work_dir, exist_ok=True)

    def step(name: str, tool: str, *arguments: str) -> None:
        run_step(name, osp.join(tools, f'{tool}.py'), *arguments)

    step('data', 'make_demo_data')
    if checkpoint is None:
        step('training', 'train', config, '--work-dir', work_dir, *options)
        with open(osp.join(work_dir, 'last_checkpoint'), encoding='utf-8') as f:
            checkpoint = f.read().strip()
    predictions, metrics = {}, {}
    for form in FORMS:
        out, test_dir = (osp.join(work_dir, name) for name in (f'{form}.pkl', f'test_{form}'))
        more = ['--work-dir', test_dir, '--form', form, '--out', out, *options]
        step(f'test, {form} form', 'test', config, checkpoint, *more)
        predictions[form], metrics[form] = out, read_metrics(test_dir)

    headline('comparison')
    title, names = TASKS[task]
    cfg = load_config(config, parse_options(cfg_options))
    first, second = (load(predictions[form]) for form in FORMS)
    device = get_device()
    models = {form: init_model(cfg, checkpoint, form=form, device=device) for form in FORMS}
    measured = measure(cfg, models, device)
    summary: dict[str, Any] = dict(task=task, checkpoint=checkpoint, **measured)
    for form in FORMS:
        # MMDetection reports no AP where there is no detection at all.
        summary[form]['metrics'] = {name: metrics[form].get(key) for key, name in names.items()}
    compare = compare_segmentations if task == 'upernet' else compare_detections
    summary['difference'] = compare(first, second)
    title = f'{title} with RePa-Swin, deploy form, on validation scenes'
    picture = draw(cfg, title, second, work_dir)
    summary['total_seconds'] = time.perf_counter() - start
    with replacing(osp.join(work_dir, 'summary.json')) as path, open(path, 'w') as f:
        json.dump(summary, f, indent=2)

    print(closing_table(summary))
    print(f'Picture: {short(picture)}', flush=True)
    return summary


def main(tools: str, argv: Sequence[str] | None = None) -> int:
    """Run the command line of the demonstration.

    Args:
        tools (str): Folder of ``train.py`` and ``test.py``.
        argv (Sequence[str], optional): The arguments. Defaults to those of the process.

    Returns:
        int: The exit status.
    """
    parser = argparse.ArgumentParser(
        description='Train a small model on digits pasted on photographs, test its training '
        'form and its deploy form, and compare them; or convert a trained vanilla one (convert).'
    )
    parser.add_argument('--task', choices=['convert', *sorted(TASKS)], default='retinanet')
    parser.add_argument('--work-dir', help='default: work_dirs/demo/TASK')
    parser.add_argument(
        '--checkpoint', help='test this checkpoint (training form) instead of training one'
    )
    parser.add_argument(
        '--vanilla', help='with --task convert: this vanilla checkpoint instead of training one'
    )
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        default=[],
        metavar='KEY=VALUE',
        help='override settings of the config',
    )
    args = parser.parse_args(argv)
    unused = 'checkpoint' if args.task == 'convert' else 'vanilla'
    if getattr(args, unused) is not None:
        parser.error(f'--{unused} does not go with --task {args.task}')
    parse_options(args.cfg_options)
    work_dir = args.work_dir or osp.join('work_dirs', 'demo', args.task)
    try:
        with clear_errors():
            try:
                if args.task == 'convert':
                    from repa_mm.demo.convert import run_conversion

                    run_conversion(tools, work_dir, args.vanilla, args.cfg_options)
                else:
                    run_demo(args.task, tools, work_dir, args.checkpoint, args.cfg_options)
            except StepError as error:
                print(f'\ndemo stopped: {error}', file=sys.stderr)
                return error.status
    except KeyboardInterrupt:
        print('\ndemo stopped: interrupted', file=sys.stderr)
        return 130
    return 0


def short(path: str) -> str:
    """A path as somebody in the current folder would type it."""
    relative = osp.relpath(path)
    return path if relative.startswith(os.pardir) else relative


def headline(text: str) -> None:
    """Print a line that a step begins with."""
    print(f'\n=== {text} ===', flush=True)


def run_step(name: str, script: str, *arguments: str) -> None:
    """Run one command, its output passed on as it comes."""
    headline(name)
    command = [script, *arguments]
    shown = shlex.join(['python', *(short(a) if osp.isabs(a) else a for a in command)])
    print(f'$ {shown}', flush=True)
    status = subprocess.call(
        [sys.executable, *command], env={**os.environ, 'PYTHONUNBUFFERED': '1'}
    )
    if status:
        # A negative status is the signal that ended the command; shells add it to 128.
        raise StepError(shown, status if status > 0 else 128 - status)


def parse_options(cfg_options: Sequence[str]) -> dict:
    """The values of ``key=value`` pairs, by their keys."""
    parser = argparse.ArgumentParser()
    parser.add_argument('--cfg-options', nargs='*', action=DictAction)
    return parser.parse_args(['--cfg-options', *cfg_options]).cfg_options


def measure(
    cfg: Config, models: dict[str, nn.Module], device: str, num_scenes: int = 60
) -> dict[str, Any]:
    """Sizes and latencies of models on validation scenes; the models take turns on every scene."""
    from repa_mm.benchmark.inputs import DatasetInputs
    from repa_mm.benchmark.latency import Options, measure_forms
    from repa_mm.benchmark.machine import environment, machine
    from repa_mm.engine.complexity import count_macs, count_parameters

    scenes = DatasetInputs(cfg)
    num_scenes = min(num_scenes, len(scenes))
    options = Options(num_images=num_scenes, warmup=5, device=device, memory=False)
    run = measure_forms(models, scenes, options, quiet=True)
    if run['interrupted']:
        raise KeyboardInterrupt
    height, width = run['shapes'][0][-2:]
    result: dict[str, Any] = dict(
        input_size=f'{width}x{height}',
        latency_scenes=num_scenes,
        device=machine(environment(device)),
    )
    for form, model in models.items():
        measured = run['forms'][form]
        result[form] = dict(
            parameters=count_parameters(model),
            backbone_parameters=count_parameters(model.backbone),
            backbone_macs=count_macs(model.backbone, (3, height, width)),
            latency_ms=measured['latency']['median'],
            backbone_latency_ms=measured['parts']['backbone']['median'],
        )
    return result


def draw(cfg: Config, title: str, predictions: list[dict], work_dir: str) -> str:
    """Draw the deploy form's predictions on scenes spread over the validation set."""
    import cv2

    from repa_mm.demo.picture import draw_detections, draw_segmentations

    segments = cfg.default_scope == 'mmseg'
    count = min(10 if segments else 12, len(predictions))
    chosen = [predictions[i * len(predictions) // count] for i in range(count)]
    if segments:
        picture = draw_segmentations(chosen, title)
    else:
        dataset = cfg.test_dataloader.dataset
        with open(osp.join(dataset.data_root, dataset.ann_file), encoding='utf-8') as f:
            annotations = json.load(f)['annotations']
        truth: dict[int, list] = collections.defaultdict(list)
        for annotation in annotations:
            x, y, w, h = annotation['bbox']
            box, label = (x, y, x + w, y + h), annotation['category_id'] - 1
            truth[annotation['image_id']].append((box, label))
        picture = draw_detections(chosen, truth, title)
    path = osp.join(work_dir, 'segmentation.png' if segments else 'detections.png')
    with replacing(path) as temporary:
        cv2.imencode('.png', picture)[1].tofile(temporary)
    return path
