"""The demonstration: data, training, tests, a table and drawings."""

import argparse
import copy
import os.path as osp
import time
from collections.abc import Sequence
from typing import Any

import mmcv
import mmengine
import numpy as np
import torch
import torch.nn as nn
from mmengine.config import Config, DictAction
from mmengine.registry import VISUALIZERS
from mmengine.runner import Runner, find_latest_checkpoint

from demo.dataset import write_digit_scenes
from repa_mm.apis.features import relative_error
from repa_mm.io.configs import load_config
from repa_mm.io.paths import config_path
from repa_mm.measure.complexity import count
from repa_mm.measure.timing import measure, show
from repa_mm.reparam import reparameterize
from repa_mm.search import speed_up

DATA = 'data/demo'
# The metrics in the table of each task.
BOX = {'coco/bbox_mAP': 'box AP', 'coco/bbox_mAP_50': 'box AP50'}
MASK = {'coco/segm_mAP': 'mask AP', 'coco/segm_mAP_50': 'mask AP50'}
SEMANTIC = {'mIoU': 'mIoU (%)', 'aAcc': 'aAcc (%)'}
TASKS = {'retinanet': BOX, 'mask_rcnn': BOX | MASK, 'upernet': SEMANTIC}
# Largest loss of the sped-up model, in points of box AP, on all validation scenes.
MAX_LOSS, NUM_IMAGES = 0.5, 200


def run_demo(
    task: str,
    work_dir: str,
    checkpoint: str | None = None,
    cfg_options: dict[str, Any] | None = None,
) -> dict[str, dict[str, float]]:
    """Train a small model on the demo's data, test it, and compare its forms.

    'retinanet', 'mask_rcnn' and 'upernet' train a model with a RePa-Swin, and test its training
    form and deploy form. 'speed_up' trains a stock RetinaNet, and makes it faster by
    :func:`repa_mm.speed_up`.

    Args:
        task (str): A key of :data:`TASKS`, or 'speed_up'.
        work_dir (str): Folder for checkpoints, logs, ``summary.json`` and ``pictures``. The data
            set is written to ``data/demo``.
        checkpoint (str, optional): Checkpoint of a trained model, in the training form, or stock
            for 'speed_up'. Defaults to None: train a model.
        cfg_options (dict, optional): Values to override in the config, by dotted names.

    Returns:
        dict: The content of ``summary.json``: for each tested model, its metrics, numbers of
        parameters (millions), multiply-adds (1e9) and latencies (ms), by their names in the table.
        For 'speed_up' the rows of its table, by candidate and format.
    """
    start = time.perf_counter()
    write_digit_scenes(DATA)
    model = 'retinanet_swin' if task == 'speed_up' else f'{task}_repa_swin'
    config = config_path(f'demo/{model}_digits.py')
    cfg = load_config(config, cfg_options)
    checkpoint = checkpoint or train(cfg, work_dir)
    if task == 'speed_up':
        folder = osp.join(work_dir, 'speed_up')
        found = speed_up(
            config, checkpoint, folder, MAX_LOSS, num_images=NUM_IMAGES, cfg_options=cfg_options
        )
        _show_time(start)
        return {row.name: row for row in found}
    cases = {'training form': (cfg, checkpoint, False), 'deploy form': (cfg, checkpoint, True)}
    rows: dict[str, dict[str, float]] = {}
    models = {}
    for name, case in cases.items():
        metrics, models[name] = test(*case, osp.join(work_dir, f'test_{name.replace(" ", "_")}'))
        rows[name] = {label: metrics.get(key, float('nan')) for key, label in TASKS[task].items()}

    loader = Runner.build_dataloader(cfg.test_dataloader)
    scenes = list(loader)
    scenes = scenes[:: -(-len(scenes) // 12)]  # at most twelve, spread evenly
    with torch.no_grad():
        for name, values in _measure(models, scenes).items():
            rows[name].update(values)
        found = _difference(*models.values(), scenes)
        pictures = osp.join(work_dir, 'pictures')
        visualizer = dict(cfg.visualizer, name=work_dir)
        _draw(models['deploy form'], scenes, visualizer, loader.dataset.metainfo, pictures)
    mmengine.dump(rows, osp.join(work_dir, 'summary.json'), indent=2)

    lines = [[label, *(f'{row[label]:.4g}' for row in rows.values())] for label in rows[name]]
    show(task, ('', *rows), lines)
    print(f'Largest difference of the features, relative to the largest feature: {found:.1e}')
    print(f'Pictures: {pictures}')
    _show_time(start)
    return rows


def _show_time(start: float) -> None:
    minutes, seconds = divmod(round(time.perf_counter() - start), 60)
    print(f'Total time: {minutes} min {seconds} s', flush=True)


def train(cfg: Config, work_dir: str) -> str:
    """Train a config's model.

    Args:
        cfg (Config): The config.
        work_dir (str): Folder for checkpoints and logs.

    Returns:
        str: Path of the last checkpoint.
    """
    _runner(cfg, work_dir).train()
    return find_latest_checkpoint(work_dir)


def test(
    cfg: Config, checkpoint: str, deploy: bool, work_dir: str
) -> tuple[dict[str, float], nn.Module]:
    """Test a checkpoint in one form.

    Args:
        cfg (Config): Config of the training form.
        checkpoint (str): Path of the checkpoint.
        deploy (bool): Test the deploy form, by :class:`~repa_mm.hooks.ReparameterizeHook`.
        work_dir (str): Folder for logs.

    Returns:
        tuple: The metrics, and the model in the tested form, in eval mode.
    """
    hook = dict(type='ReparameterizeHook', when='test' if deploy else 'val')
    hooks = dict(reparameterize=hook)
    runner = _runner(cfg, work_dir, load_from=checkpoint, default_hooks=hooks)
    metrics = runner.test()
    model = reparameterize(runner.model) if deploy else runner.model
    return metrics, model.eval()


def _runner(cfg: Config, work_dir: str, **changes: Any) -> Runner:
    cfg = copy.deepcopy(cfg)
    # Runners in one process share a log and a visualizer if the names are equal.
    cfg.visualizer.pop('name', None)
    cfg.merge_from_dict(
        dict(changes, work_dir=work_dir, experiment_name=osp.basename(osp.normpath(work_dir)))
    )
    return Runner.from_cfg(cfg)


def _draw(
    model: nn.Module, scenes: Sequence[dict], visualizer: dict, metainfo: dict, folder: str
) -> None:
    """Draw ground truth and predictions on scenes, with the codebase's visualizer."""
    drawing = VISUALIZERS.build(dict(visualizer, vis_backends=None))
    drawing.dataset_meta = metainfo
    for scene in scenes:
        (sample,) = model.test_step(scene)
        image = mmcv.imread(sample.img_path, channel_order='rgb')
        path = osp.join(folder, osp.basename(sample.img_path))
        drawing.add_datasample('scene', image, sample.cpu(), out_file=path)


def _measure(models: dict[str, nn.Module], scenes: Sequence[dict]) -> dict[str, dict[str, float]]:
    """Measure sizes of models and median latencies on the first scene; return rows of the table."""
    inputs = next(iter(models.values())).data_preprocessor(scenes[0], False)['inputs']
    turns = 5 * len(scenes)
    whole = measure({name: m.test_step for name, m in models.items()}, scenes[0], turns)
    part = measure({name: m.backbone for name, m in models.items()}, inputs, turns)
    rows = {}
    for name, model in models.items():
        parameters, macs = count(model.backbone, inputs)
        rows[name] = {
            'parameters, model (M)': sum(p.numel() for p in model.parameters()) / 1e6,
            'parameters, backbone (M)': parameters / 1e6,
            'GMACs, backbone, {}x{}'.format(*inputs.shape[2:]): macs / 1e9,
            'latency, model (ms)': float(np.median(whole[name])),
            'latency, backbone (ms)': float(np.median(part[name])),
        }
    return rows


def _difference(first: nn.Module, second: nn.Module, scenes: Sequence[dict]) -> float:
    """Return the largest difference of two models' features, relative to the largest feature."""
    images = [first.data_preprocessor(scene, False)['inputs'] for scene in scenes]
    return max(relative_error(second.extract_feat(x), first.extract_feat(x)) for x in images)


def main() -> None:
    """Run the command line of the demonstration."""
    parser = argparse.ArgumentParser(
        description='Train a small model on digits pasted on photographs, test its training '
        'form and deploy form, and compare them. Or train a stock model and make it faster '
        '(speed_up).'
    )
    parser.add_argument(
        '--task',
        choices=[*TASKS, 'speed_up', 'data'],
        default='retinanet',
        help='data: only write data/demo',
    )
    parser.add_argument('--work-dir', help='default: work_dirs/demo/TASK')
    parser.add_argument(
        '--checkpoint', help='checkpoint of a trained model to take, instead of training one'
    )
    parser.add_argument(
        '--cfg-options', nargs='+', action=DictAction, help='override the config: key=value ...'
    )
    args = parser.parse_args()
    if args.task == 'data':
        write_digit_scenes(DATA)
    else:
        work_dir = args.work_dir or osp.join('work_dirs', 'demo', args.task)
        run_demo(args.task, work_dir, args.checkpoint, args.cfg_options)
