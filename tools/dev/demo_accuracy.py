"""Accuracy of the demo's models over seeds: vanilla, RePa from scratch, converted, fine-tuned.

For each seed the vanilla model is trained, tested, converted without training, and fine-tuned for
one more epoch; so are the converted ones, and the RePa model is trained from scratch. The RePa
models are tested in their deploy form. The data set is ``data/demo`` of the current folder::

    python tools/dev/demo_accuracy.py --task retinanet --seeds 0 1 2

A run that was stopped goes on with what its files lack. Several processes may share the seeds of
one work dir: each takes the seeds that no other one has. A table of all files comes at the end.
"""

import argparse
import contextlib
import fcntl
import gc
import glob
import json
import os
import os.path as osp
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import torch

import repa_mm
from repa_mm.benchmark.output import write_json
from repa_mm.demo.dataset import write_digit_scenes
from repa_mm.demo.run import FINE_TUNING
from repa_mm.fit.pretrained import convert_checkpoint
from repa_mm.run import runner_for_testing, runner_for_training
from repa_mm.run.cli import add_cfg_options

DATA = 'data/demo'
EPOCH = 150  # iterations: 1200 scenes in batches of 8
NEVER = 10**9
# The metrics of a task, and what makes them percent.
METRICS = {
    'retinanet': {'coco/bbox_mAP': ('box AP', 100)},
    'mask_rcnn': {'coco/bbox_mAP': ('box AP', 100), 'coco/segm_mAP': ('mask AP', 100)},
    'upernet': {'mIoU': ('mIoU', 1)},
}
ONE_MORE = ', one more epoch'


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--task', choices=list(METRICS), default='retinanet')
    parser.add_argument('--seeds', type=int, nargs='*', default=[0, 1, 2])
    parser.add_argument('--vanilla', help='a vanilla checkpoint, instead of training one')
    parser.add_argument('--epochs', type=int, help="of the trainings (default: the config's own)")
    parser.add_argument('--work-dir', default='work_dirs/demo_accuracy')
    parser.add_argument('--ratios', type=float, nargs='*', default=[0.75, 0.5])
    parser.add_argument('--norms', choices=['keep', 'fold'], nargs='*', default=['keep', 'fold'])
    parser.add_argument('--num-images', type=int, default=64, help='to convert with')
    parser.add_argument(
        '--no-scratch', action='store_true', help='no RePa model that is trained from scratch'
    )
    parser.add_argument('--no-fine-tuning', action='store_true')
    add_cfg_options(parser)
    args = parser.parse_args()
    if args.epochs is not None and args.epochs < 1:
        parser.error(f'--epochs must be at least 1, but is {args.epochs}')
    return args


def training_options(task: str, epochs: int | None, seed: int) -> dict:
    """The settings of a training from scratch, without a validation."""
    options: dict = {'randomness.seed': seed, 'train_cfg.val_begin': NEVER}
    if epochs is None:
        return options
    if task == 'upernet':
        return options | iterations(epochs * EPOCH)
    return options | {'train_cfg.max_epochs': epochs, 'param_scheduler.1.end': epochs}


def iterations(number: int) -> dict:
    return {
        'train_cfg.max_iters': number,
        'param_scheduler.1.end': number,
        'default_hooks.checkpoint.interval': number,
    }


def fine_tuning_options(task: str, seed: int) -> dict:
    """The settings of the one epoch more: those of the demo of a conversion."""
    options = dict(FINE_TUNING)
    if task == 'upernet':
        rate = options['optim_wrapper.optimizer.lr']
        options = {'optim_wrapper.optimizer.lr': rate, **iterations(EPOCH)}
    options['default_hooks.checkpoint.save_optimizer'] = False
    return {**options, 'randomness.seed': seed, 'train_cfg.val_begin': NEVER}


class Seed:
    """What one seed of a task has, in a JSON file.

    Args:
        args (argparse.Namespace): The command line.
        seed (int): The seed.

    Raises:
        ValueError: If the file is of other settings.
    """

    def __init__(self, args: argparse.Namespace, seed: int) -> None:
        self.args, self.seed = args, seed
        self.folder = osp.abspath(osp.join(args.work_dir, f'{args.task}_{seed}'))
        self.path = f'{self.folder}.json'
        self.failed = False
        settings = dict(
            epochs=args.epochs, num_images=args.num_images, cfg_options=args.cfg_options or {}
        )
        files = {}
        if args.vanilla:
            settings['vanilla'] = files['vanilla'] = osp.abspath(args.vanilla)
        self.found: dict = dict(task=args.task, seed=seed, settings=settings, rows={}, files=files)
        if osp.isfile(self.path):
            with open(self.path, encoding='utf-8') as file:
                self.found = json.load(file)
            if self.found['settings'] != json.loads(json.dumps(settings)):
                raise ValueError(f'{self.path} is of other settings: {self.found["settings"]}')

    def config(self, kind: str) -> str:
        return repa_mm.config_path(f'demo/{self.args.task}_{kind}_digits.py')

    def options(self, options: dict) -> dict:
        return {**options, **(self.args.cfg_options or {})}

    def say(self, text: str) -> None:
        when = time.strftime('%H:%M:%S')
        print(f'ROW {when} {self.args.task}, seed {self.seed}: {text}', flush=True)

    def step(self, name: str, work: Callable[[], None]) -> bool:
        """Do something; a failure is told, and leaves the other steps."""
        done = False
        start = time.perf_counter()
        try:
            work()
            done = True
            self.say(f'{name} done in {time.perf_counter() - start:.0f} s')
        except Exception:
            self.failed = True
            traceback.print_exc()
            self.say(f'{name} FAILED')
        write_json(self.found, self.path)
        gc.collect()
        return done

    def train(self, name: str, config: str) -> None:
        """Train from scratch, or go on with a training that was stopped."""
        if name in self.found['files']:
            return

        def work() -> None:
            options = self.options(training_options(self.args.task, self.args.epochs, self.seed))
            folder = osp.join(self.folder, name)
            runner_for_training(config, folder, resume='auto', cfg_options=options).train()
            self.found['files'][name] = last_checkpoint(folder)

        self.step(f'training of {name}', work)

    def convert(self, name: str, norm: str, ratio: float) -> None:
        if name in self.found['files']:
            return

        def work() -> None:
            # No dot in the name of a config.
            out = osp.join(self.folder, f'{norm}_{round(1000 * ratio)}.pth')
            result = convert_checkpoint(
                self.config('swin'),
                self.found['files']['vanilla'],
                out,
                ratio,
                norm,
                self.args.num_images,
                cfg_options=self.args.cfg_options,
            )
            self.found.setdefault('differences', {})[name] = result['differences']
            self.found['files'][name] = out

        self.step(f'conversion to {name}', work)

    def test(self, name: str, config: str, checkpoint: str, form: str | None) -> None:
        if name in self.found['rows']:
            return

        def work() -> None:
            folder = osp.join(self.folder, 'test')
            options = self.options({})
            runner = runner_for_testing(config, checkpoint, folder, form, cfg_options=options)
            values = runner.test()
            wanted = METRICS[self.args.task]
            row = {title: scale * float(values[key]) for key, (title, scale) in wanted.items()}
            self.found['rows'][name] = row
            self.say(f'{name}: {row}')

        self.step(f'test of {name}', work)

    def fine_tune(self, name: str, config: str, checkpoint: str, form: str | None) -> None:
        """Train for one more epoch, test, and remove the checkpoint."""
        title = name + ONE_MORE
        if title in self.found['rows']:
            return
        folder = osp.join(self.folder, 'tuned_' + name.replace(' ', '_').replace('.', '_'))

        def work() -> None:
            options = self.options(fine_tuning_options(self.args.task, self.seed))
            options['load_from'] = checkpoint
            runner_for_training(config, folder, cfg_options=options).train()

        if self.step(f'fine-tuning of {name}', work):
            tuned = last_checkpoint(folder)
            self.test(title, config, tuned, form)
            if title in self.found['rows']:
                os.unlink(tuned)

    def run(self) -> None:
        """All rows of the seed, those first that take least."""
        vanilla, files = self.config('swin'), self.found['files']
        self.train('vanilla', vanilla)
        if 'vanilla' in files:
            self.test('vanilla', vanilla, files['vanilla'], None)
        names = {}
        for ratio in self.args.ratios if 'vanilla' in files else ():
            for norm in self.args.norms:
                name = f'converted, {norm}, {ratio:g}'
                self.convert(name, norm, ratio)
                if name in files:
                    names[name] = f'{osp.splitext(files[name])[0]}.py'
                    self.test(name, names[name], files[name], 'deploy')
        if not self.args.no_scratch:
            self.train('RePa', self.config('repa_swin'))
            if 'RePa' in files:
                self.test('RePa', self.config('repa_swin'), files['RePa'], 'deploy')
        if not self.args.no_fine_tuning and 'vanilla' in files:
            self.fine_tune('vanilla', vanilla, files['vanilla'], None)
            for name, config in names.items():
                self.fine_tune(name, config, files[name], 'deploy')


def last_checkpoint(folder: str) -> str:
    with open(osp.join(folder, 'last_checkpoint'), encoding='utf-8') as file:
        return file.read().strip()


@contextlib.contextmanager
def claimed(path: str, wait: bool = False) -> Iterator[bool]:
    """Whether no other process has claimed the file; the claim ends with the process."""
    os.makedirs(osp.dirname(osp.abspath(path)), exist_ok=True)
    with open(path, 'w') as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def table(task: str, work_dir: str) -> str:
    """Mean and standard deviation over the seeds, and of the differences to the vanilla model."""
    seeds = []
    for path in sorted(glob.glob(osp.join(glob.escape(work_dir), f'{task}_*.json'))):
        with open(path, encoding='utf-8') as file:
            seeds.append(json.load(file))
    names = list(dict.fromkeys(name for seed in seeds for name in seed['rows']))
    # The trained ones first, and those of one more epoch last.
    names.sort(key=lambda name: (name.endswith(ONE_MORE), 'converted' in name, name != 'vanilla'))
    lines = [
        '| model | metric | by seed | mean and standard deviation | minus vanilla, same seed |',
        '| --- | --- | --- | --- | --- |',
    ]
    for name in names:
        reference = 'vanilla' + ONE_MORE * name.endswith(ONE_MORE)
        for metric, _ in METRICS[task].values():
            own = [seed for seed in seeds if name in seed['rows']]
            values = [seed['rows'][name][metric] for seed in own]
            pairs = [
                seed['rows'][name][metric] - seed['rows'][reference][metric]
                for seed in own
                if reference in seed['rows'] and name != reference
            ]
            each = ', '.join(f'{seed["seed"]}: {value:.1f}' for seed, value in zip(own, values))
            cells = name, metric, each, spread(values), spread(pairs, '+') if pairs else ''
            lines.append(f'| {" | ".join(cells)} |')
    return '\n'.join(lines)


def spread(values: list[float], sign: str = '') -> str:
    text = f'{statistics.fmean(values):{sign}.2f}'
    return f'{text} ± {statistics.stdev(values):.2f}' if len(values) > 1 else text


def main() -> None:
    args = parse_args()
    failed = False
    if args.seeds:
        os.makedirs(args.work_dir, exist_ok=True)
        with claimed(osp.join(args.work_dir, 'data.lock'), wait=True):
            write_digit_scenes(DATA)
        print(f'PyTorch {torch.__version__}, {torch.get_num_threads()} threads', flush=True)
    for number in args.seeds:
        with claimed(osp.join(args.work_dir, f'{args.task}_{number}.lock')) as mine:
            if not mine:
                print(f"seed {number} of {args.task} is another process's")
                continue
            seed = Seed(args, number)
            seed.run()
            failed |= seed.failed
    print(table(args.task, args.work_dir), flush=True)
    sys.exit(int(failed))


if __name__ == '__main__':
    main()
