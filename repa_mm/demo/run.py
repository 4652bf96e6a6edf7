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

from repa_mm.checkpoints import load_checkpoint
from repa_mm.demo.report import (
    closing_table,
    compare_detections,
    compare_segmentations,
    read_metrics,
)
from repa_mm.files import check_writable, replacing
from repa_mm.runtime.cli import DictAction, clear_errors

# For each task its name in the picture's title, and the metrics of the closing table.
TASKS = {
    'retinanet': ('RetinaNet', {'coco/bbox_mAP': 'box AP', 'coco/bbox_mAP_50': 'box AP50'}),
    'mask_rcnn': (
        'Mask R-CNN',
        {
            'coco/bbox_mAP': 'box AP',
            'coco/bbox_mAP_50': 'box AP50',
            'coco/segm_mAP': 'mask AP',
            'coco/segm_mAP_50': 'mask AP50',
        },
    ),
    'upernet': ('UPerNet', {'mIoU': 'mIoU (%)', 'aAcc': 'aAcc (%)'}),
}
FORMS = ('training', 'deploy')


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
        task: 'retinanet', 'mask_rcnn' or 'upernet'.
        tools: Folder of ``train.py`` and ``test.py``; ``configs`` lies beside it.
        work_dir: Folder for everything that is written, except the data set (``data/demo``).
        checkpoint: A checkpoint in training form to test, instead of training one.
        cfg_options: ``key=value`` pairs that override the config, for training and tests.

    Returns:
        The content of ``summary.json``.

    Raises:
        StepError: If one of the commands fails.
        FileNotFoundError, CheckpointError: If the checkpoint cannot be read.
        OSError: If ``work_dir`` cannot be written to.
    """
    start = time.perf_counter()
    config = osp.join(
        osp.dirname(osp.abspath(tools)), 'configs', 'demo', f'{task}_repa_swin_digits.py'
    )
    options = ['--cfg-options', *cfg_options] if cfg_options else []
    tool = {name: osp.join(tools, f'{name}.py') for name in ('make_demo_data', 'train', 'test')}
    if checkpoint is not None:
        load_checkpoint(checkpoint)  # before anything is done
    check_writable(work_dir)
    os.makedirs(work_dir, exist_ok=True)

    _step('data', tool['make_demo_data'])
    if checkpoint is None:
        _step('training', tool['train'], config, '--work-dir', work_dir, *options)
        with open(osp.join(work_dir, 'last_checkpoint'), encoding='utf-8') as f:
            checkpoint = f.read().strip()
    predictions = {form: osp.join(work_dir, f'{form}.pkl') for form in FORMS}
    test_dirs = {form: osp.join(work_dir, f'test_{form}') for form in FORMS}
    for form in FORMS:
        _step(
            f'test, {form} form',
            tool['test'],
            config,
            checkpoint,
            '--work-dir',
            test_dirs[form],
            '--form',
            form,
            '--out',
            predictions[form],
            *options,
        )

    _headline('comparison')
    title, names = TASKS[task]
    from mmengine.fileio import load

    loaded = {form: load(predictions[form]) for form in FORMS}
    compare = compare_segmentations if task == 'upernet' else compare_detections
    summary: dict[str, Any] = dict(task=task, checkpoint=checkpoint)
    summary.update(_measure(config, checkpoint, cfg_options))
    for form in FORMS:
        # MMDetection reports no AP where there is no detection at all.
        metrics = read_metrics(test_dirs[form])
        summary[form]['metrics'] = {name: metrics.get(key) for key, name in names.items()}
    summary['difference'] = compare(*(loaded[form] for form in FORMS))
    picture = _draw(task, title, config, cfg_options, loaded['deploy'], work_dir)
    summary['total_seconds'] = time.perf_counter() - start
    with (
        replacing(osp.join(work_dir, 'summary.json')) as path,
        open(path, 'w', encoding='utf-8') as f,
    ):
        json.dump(summary, f, indent=2)

    print(closing_table(summary))
    print(f'Picture: {_short(picture)}', flush=True)
    return summary


def main(tools: str, argv: Sequence[str] | None = None) -> int:
    """Command line of the demonstration; returns the exit status."""
    parser = argparse.ArgumentParser(
        description='Train a small RePa-Swin on digits pasted on photographs, test its training '
        'form and its deploy form, and compare them.'
    )
    parser.add_argument('--task', choices=sorted(TASKS), default='retinanet')
    parser.add_argument('--work-dir', help='default: work_dirs/demo/TASK')
    parser.add_argument(
        '--checkpoint', help='test this checkpoint (training form) instead of training one'
    )
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        default=[],
        metavar='KEY=VALUE',
        help='override settings of the config',
    )
    args = parser.parse_args(argv)
    _parse_options(args.cfg_options)
    try:
        with clear_errors():
            try:
                run_demo(
                    args.task,
                    tools,
                    args.work_dir or osp.join('work_dirs', 'demo', args.task),
                    args.checkpoint,
                    args.cfg_options,
                )
            except StepError as e:
                print(f'\ndemo stopped: {e}', file=sys.stderr)
                return e.status
    except KeyboardInterrupt:
        print('\ndemo stopped: interrupted', file=sys.stderr)
        return 130
    return 0


def _short(path: str) -> str:
    """A path as somebody in the current folder would type it."""
    relative = osp.relpath(path)
    return path if relative.startswith(os.pardir) else relative


def _headline(text: str) -> None:
    print(f'\n=== {text} ===', flush=True)


def _step(name: str, script: str, *arguments: str) -> None:
    """Run one command, its output passed on as it comes."""
    _headline(name)
    shown = shlex.join(
        ['python', *(_short(a) if osp.isabs(a) else a for a in (script, *arguments))]
    )
    print(f'$ {shown}', flush=True)
    status = subprocess.call(
        [sys.executable, script, *arguments], env=dict(os.environ, PYTHONUNBUFFERED='1')
    )
    if status:
        # A negative status is the signal that ended the command; shells add it to 128.
        raise StepError(shown, status if status > 0 else 128 - status)


def _load_config(config: str, cfg_options: Sequence[str]) -> Any:
    """The config that the tools saw, read as they read it."""
    from repa_mm.runtime import load_config

    return load_config(config, _parse_options(cfg_options))


def _parse_options(cfg_options: Sequence[str]) -> dict:
    parser = argparse.ArgumentParser()
    parser.add_argument('--cfg-options', nargs='*', action=DictAction)
    return parser.parse_args(['--cfg-options', *cfg_options]).cfg_options


def _measure(
    config: str, checkpoint: str, cfg_options: Sequence[str], num_scenes: int = 60
) -> dict[str, Any]:
    """Sizes and latencies of both forms; the forms take turns on every scene."""
    from mmengine.device import get_device

    from repa_mm.benchmark.inputs import DatasetInputs
    from repa_mm.benchmark.latency import Options, measure_forms
    from repa_mm.benchmark.machine import environment, machine
    from repa_mm.engine.complexity import count_macs, count_parameters
    from repa_mm.runtime import init_model

    cfg = _load_config(config, cfg_options)
    device = get_device()
    models = {form: init_model(cfg, checkpoint, form=form, device=device) for form in FORMS}
    scenes = DatasetInputs(cfg)
    num_scenes = min(num_scenes, len(scenes))
    run = measure_forms(
        models,
        scenes,
        Options(num_images=num_scenes, warmup=5, device=device, memory=False),
        quiet=True,
    )
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


def _draw(
    task: str,
    title: str,
    config: str,
    cfg_options: Sequence[str],
    predictions: list[dict],
    work_dir: str,
) -> str:
    """Draw the deploy form's predictions on scenes spread over the validation set."""
    import cv2

    from repa_mm.demo.picture import draw_detections, draw_segmentations

    title = f'{title} with RePa-Swin, deploy form, on validation scenes'
    count = min(10 if task == 'upernet' else 12, len(predictions))
    chosen = [predictions[i * len(predictions) // count] for i in range(count)]
    if task == 'upernet':
        picture = draw_segmentations(chosen, title)
        path = osp.join(work_dir, 'segmentation.png')
    else:
        dataset = _load_config(config, cfg_options).test_dataloader.dataset
        with open(osp.join(dataset.data_root, dataset.ann_file), encoding='utf-8') as f:
            annotations = json.load(f)['annotations']
        ground_truth: dict[int, list] = collections.defaultdict(list)
        for annotation in annotations:
            x, y, w, h = annotation['bbox']
            ground_truth[annotation['image_id']].append(
                ((x, y, x + w, y + h), annotation['category_id'] - 1)
            )
        picture = draw_detections(chosen, ground_truth, title)
        path = osp.join(work_dir, 'detections.png')
    with replacing(path) as temporary:
        cv2.imencode('.png', picture)[1].tofile(temporary)
    return path
