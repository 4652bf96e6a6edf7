"""Accuracy of the demo's models over seeds, stock and as RePaFormers.

For each seed both models are trained from scratch. RePa models are tested in their deploy form. The
data set is ``data/demo`` of the current folder::

    python -m benchmarks.demo_accuracy --task retinanet --seeds 0 1 2

With ``--structures`` the stock model and one of each structure of :data:`STRUCTURES` are trained
instead.

Results are appended to a file with the columns of results.csv. A table of its rows comes at the
end.
"""

import argparse
from pathlib import Path

from mmengine.config import Config, DictAction

import projects.linear_path  # noqa: F401
from benchmarks.compare import append, percent
from benchmarks.tables import Row, difference, grouped, listed, read, table
from demo.dataset import write_digit_scenes
from demo.run import test, train
from repa_mm import config_path
from repa_mm.io.configs import load_config

EPOCH = 150  # iterations: 1200 scenes in batches of 8
# Tasks, and their names in results.csv.
TASKS = {
    'retinanet': 'RetinaNet, digits',
    'mask_rcnn': 'Mask R-CNN, digits',
    'upernet': 'UperNet, digits',
}
# Channel idle, and what it deploys, trained as it is: the ablation of table 5 of the ICML paper.
STRUCTURES = {
    'channel idle': dict(type='ChannelIdle'),
    'merged structure': dict(type='LinearPath'),
    'merged structure without norms': dict(type='LinearPath', norm_cfg=None),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--task', choices=TASKS, default='retinanet')
    parser.add_argument('--seeds', type=int, nargs='*', default=[0, 1, 2])
    parser.add_argument('--epochs', type=int, help="of the trainings (default: the config's own)")
    parser.add_argument('--work-dir', default='work_dirs/demo_accuracy')
    parser.add_argument('--out', default='work_dirs/demo_accuracy.csv')
    parser.add_argument('--structures', action='store_true', help='the ablation of structures')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, default={})
    return parser.parse_args()


def options(task: str, seed: int, epochs: int | None = None) -> dict:
    """Settings of a training without a validation."""
    found = {'randomness.seed': seed, 'train_cfg.val_begin': 10**9}
    if epochs and task == 'upernet':
        keys = 'train_cfg.max_iters', 'param_scheduler.1.end', 'default_hooks.checkpoint.interval'
        found.update(dict.fromkeys(keys, epochs * EPOCH))
    elif epochs:
        found.update(dict.fromkeys(('train_cfg.max_epochs', 'param_scheduler.1.end'), epochs))
    return found


def run(args: argparse.Namespace, seed: int, folder: Path) -> None:
    """Train and test the models of one seed."""
    stock, repa = (
        config_path(f'demo/{args.task}_{name}_digits.py') for name in ('swin', 'repa_swin')
    )

    def load(name: str, config: str, **settings) -> Config:
        cfg = load_config(config, {**settings, **args.cfg_options})
        if name in STRUCTURES:
            structures = [STRUCTURES[name]]
            backbone = dict(type='Restructured', model=cfg.model.backbone, structures=structures)
            cfg.model.backbone = backbone
        return cfg

    def trained(name: str, config: str) -> str:
        cfg = load(name, config, **options(args.task, seed, args.epochs))
        return train(cfg, str(folder / name))

    def tested(name: str, config: str, checkpoint: str, deploy: bool = True) -> None:
        cfg = load(name, config)
        metrics, _ = test(cfg, checkpoint, deploy, str(folder / 'test' / name))
        what = f'after {args.epochs or "all"} epochs' + ', by structure' * args.structures
        row = dict(what=what, model=TASKS[args.task], form=name, run=f'seed {seed}')
        append(args.out, row, percent(metrics))

    tested('stock', stock, trained('stock', stock), False)
    for name in STRUCTURES if args.structures else ['RePa']:
        config = stock if args.structures else repa
        tested(name, config, trained(name, config))


def main() -> None:
    args = parse_args()
    write_digit_scenes('data/demo')
    for seed in args.seeds:
        run(args, seed, Path(args.work_dir) / f'{args.task}_{seed}')
    rows = read(args.out)
    base = grouped(rows, 'what', 'model', 'form')

    def minus(rows: list[Row]) -> str:
        row = rows[0]
        return difference(rows, base[row['what'], row['model'], 'stock'])

    extra = {'by seed': listed, 'minus stock of the same seed': minus}
    print(table(rows, 'model what form', extra=extra))


if __name__ == '__main__':
    main()
