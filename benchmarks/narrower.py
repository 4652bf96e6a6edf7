r"""Accuracy of small trained models after a conversion, and after more training, over seeds.

For each seed the script trains the original, tests it, and goes on from its weights with some of:

- ``heads``: conversions with narrower FFNs and heads, and by one budget;
- ``trained``, ``converted``, ``idle``, ``fitted``: half an epoch and one more epoch for the
  original, for a converted model and for channel-idle FFNs that its weights fill or that are fitted
  to it, at equal multiply-adds, with a tenth of the first learning rate and multiples of that.

The data are those of ``tools/demo.py --task data`` and :mod:`benchmarks.objects`::

    python -m benchmarks.narrower --task clothes --seeds 0 1 2
    python -m benchmarks.narrower --task digits --seeds 0 1 2 --lr-factors 1 3
    python -m benchmarks.narrower --task mask_rcnn --seeds 0 1 2 --ways heads    # or upernet

Results are appended to a file with the columns of results.csv. Originals in the work
folder are used again.
"""

import argparse
import functools
import itertools
from pathlib import Path
from typing import NamedTuple

import torch
from mmengine.config import Config, DictAction
from mmengine.runner import find_latest_checkpoint

from benchmarks.compare import IMAGES, append, percent
from benchmarks.even import even_sizes
from demo.run import test, train
from repa_mm import config_path
from repa_mm.apis import open_model, read_images
from repa_mm.convert.changed_config import with_structures
from repa_mm.convert.pretrained import conversion_of, save_model, split_images
from repa_mm.io.configs import load_config


class Task(NamedTuple):
    """A model: its name in results.csv, config, iterations of an epoch, and epochs of its training.

    Its weights start from those of the task ``start``.
    """

    name: str
    config: str
    epoch: int
    epochs: int
    start: str | None = None


TASKS = {
    'clothes': Task('RetinaNet, clothes', 'demo/retinanet_swin_clothes.py', 500, 2),
    'digits': Task('RetinaNet, digits', 'demo/retinanet_swin_digits.py', 150, 3),
    'mask_rcnn': Task('Mask R-CNN, digits', 'demo/mask_rcnn_swin_digits.py', 150, 1, 'digits'),
    'upernet': Task('UperNet, digits', 'demo/upernet_swin_digits.py', 150, 2, 'digits'),
}
HEADS = {
    'FFNs 0.375, heads half': dict(ffn=0.375, qk=0.5, v=0.5),
    'FFNs 0.2, heads a quarter': dict(ffn=0.2, qk=0.25, v=0.25),
    'the same multiply-adds by one budget': dict(budget=0.22),
}
WAYS = {
    'trained': 'the original, trained on',
    'converted': 'converted, then trained',
    'idle': 'channel idle, copied from it, then trained',
    'fitted': 'channel idle, fitted to it, then trained',
}
MORE = {0.0: 'no epoch', 0.5: 'half an epoch', 1.0: 'one epoch'}
# Multiply-adds of channel-idle FFNs: C (H / 4) twice and C^2 of 2 C H with H = 4 C.
IDLE_RATIO, KEEP = 0.75, 0.375
LEARNING_RATE = 1e-4  # of more training, a tenth of the first


def schedule(cfg: Config, iterations: int, seed: int) -> Config:
    """Set a training without validation: a warm-up of 50 iterations, then a cosine."""
    cfg.train_cfg = dict(type='IterBasedTrainLoop', max_iters=iterations, val_begin=10**9)
    cfg.param_scheduler = [
        dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=50),
        dict(type='CosineAnnealingLR', by_epoch=False, begin=0, end=iterations),
    ]
    cfg.default_hooks.checkpoint = dict(
        type='CheckpointHook', by_epoch=False, interval=iterations, save_optimizer=False
    )
    cfg.log_processor = dict(type='LogProcessor', by_epoch=False)
    cfg.randomness = dict(seed=seed)
    return cfg


class Run:
    """The models of one task and seed."""

    def __init__(self, task: str, seed: int, args: argparse.Namespace) -> None:
        self.task, self.seed, self.args = TASKS[task], seed, args
        self.folder = Path(args.work_dir) / f'{task}_{seed}'
        self.config = config_path(self.task.config)

    def write(self, what: str, form: str, metrics: dict[str, float]) -> None:
        row = dict(what=what, model=self.task.name, form=form, run=f'seed {self.seed}')
        append(self.args.out, row, metrics)

    def test(
        self, name: str, cfg: Config, checkpoint: str, deploy: bool = False
    ) -> dict[str, float]:
        """The metrics of a model, in percent."""
        return percent(test(cfg, checkpoint, deploy, str(self.folder / 'test' / name))[0])

    def load(self) -> Config:
        return load_config(self.config, self.args.cfg_options)

    @functools.cached_property
    def original(self) -> str:
        """Path of the original's weights, which are trained unless they are there."""
        folder = self.folder / 'original'
        if (folder / 'last_checkpoint').exists():
            return find_latest_checkpoint(str(folder))
        cfg = schedule(self.load(), round(self.task.epoch * self.task.epochs), self.seed)
        if self.task.start:
            cfg.load_from = Run(self.task.start, self.seed, self.args).original
        return train(cfg, str(folder))

    def convert(
        self,
        name: str,
        budget: float | None = None,
        idle_ratio: float | None = None,
        **fractions: float,
    ) -> tuple[Config, str]:
        """The config and the checkpoint of a conversion of the original.

        Args:
            name (str): Of the files.
            budget (float, optional): As for ``convert_pretrained``. Defaults to 0.5.
            idle_ratio (float, optional): As for ``Conversion``.
            **fractions (float): As for :func:`even_sizes`, instead of a budget.
        """
        cfg = self.load()
        model = open_model(cfg, self.original).to('cuda' if torch.cuda.is_available() else 'cpu')
        images, held_out = split_images(read_images(cfg, 'train', IMAGES + IMAGES // 8))
        parts = ['ffn'] if list(fractions) == ['ffn'] else None
        conversion = conversion_of(model, images, parts=parts, idle_ratio=idle_ratio)
        sizes = even_sizes(conversion, **fractions) if fractions else conversion.sizes(budget)
        out = self.folder / f'{name}.pth'
        save_model(conversion.fit(sizes)[0], self.original, str(out), held_out[0])
        return load_config(str(out.with_suffix('.py'))), str(out)

    def heads(self) -> None:
        what = 'channels and heads'
        self.write(what, 'original', self.test('original', self.load(), self.original))
        for i, (form, options) in enumerate(HEADS.items()):
            self.write(what, form, self.test(f'heads_{i}', *self.convert(f'heads_{i}', **options)))

    def more(self, way: str) -> None:
        """Train on for some epochs with some learning rates, and test before and after that."""
        if way == 'idle':
            structure = dict(type='ChannelIdle', idle_ratio=IDLE_RATIO)
            cfg = self.load()
            cfg.model = with_structures(cfg.model, structure)
            cfg.model.init_cfg = dict(type='Pretrained', checkpoint=self.original)
            checkpoint = None
        elif way == 'converted':
            cfg, checkpoint = self.convert('converted', ffn=KEEP)
        elif way == 'fitted':
            cfg, checkpoint = self.convert('fitted', idle_ratio=IDLE_RATIO)
        else:
            cfg, checkpoint = self.load(), self.original
        form, deploy = WAYS[way], way in ('idle', 'fitted')
        if 0 in self.args.epochs and checkpoint:  # filled BatchNorms have no statistics yet
            self.write_more(form, MORE[0], self.test(f'{way}_0', cfg, checkpoint, deploy))
        for factor, epochs in itertools.product(self.args.lr_factors, self.args.epochs):
            if not epochs:
                continue
            name = MORE[epochs] + (f', {factor:g} times the rate' if factor != 1 else '')
            schedule(cfg, round(self.task.epoch * epochs), self.seed)
            cfg.load_from = checkpoint
            cfg.optim_wrapper.optimizer.lr = factor * LEARNING_RATE
            folder = f'{way}_{epochs:g}_{factor:g}'
            trained = train(cfg, str(self.folder / folder))
            self.write_more(form, name, self.test(folder, cfg, trained, deploy))

    def write_more(self, form: str, name: str, metrics: dict[str, float]) -> None:
        self.write('fine-tuned', form, {name: next(iter(metrics.values()))})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--task', choices=TASKS, required=True)
    parser.add_argument('--seeds', type=int, nargs='*', default=[0, 1, 2])
    parser.add_argument('--ways', choices=('heads', *WAYS), nargs='*', default=['heads', *WAYS])
    parser.add_argument('--epochs', type=float, nargs='+', choices=MORE, default=[*MORE])
    parser.add_argument('--lr-factors', type=float, nargs='+', default=[1.0])
    parser.add_argument('--work-dir', default='work_dirs/narrower')
    parser.add_argument('--out', default='work_dirs/narrower.csv')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, default={})
    args = parser.parse_args()
    for seed in args.seeds:
        run = Run(args.task, seed, args)
        print(run.original)
        for way in args.ways:
            run.heads() if way == 'heads' else run.more(way)


if __name__ == '__main__':
    main()
