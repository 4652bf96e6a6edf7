"""Pretrain a small ViT and RePa-ViT with DINO on photographs, and plot the accuracy of k-NN."""

import argparse
import json
import os.path as osp
import time

import matplotlib
from mmengine.hooks import Hook

from repa_mm.demo.photos import write_photos
from repa_mm.run import runner_for_training
from repa_mm.run.knn import knn_evaluate

CONFIGS = dict(
    vanilla='configs/demo/dino_vit_photos.py', RePa='configs/demo/dino_repa_vit_photos.py'
)


class SaveStart(Hook):
    """Keeps what a training starts from."""

    priority = 'LOWEST'  # after DINOHook

    def before_train(self, runner) -> None:
        runner.save_checkpoint(runner.work_dir, 'epoch_0.pth', save_optimizer=False)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--data', default='data/photos')
    parser.add_argument('--work-dir', default='work_dirs/dino_photos')
    parser.add_argument('--epochs', type=int, default=40, help='a multiple of 4')
    parser.add_argument('--seeds', type=int, nargs='+', default=[0])
    parser.add_argument('--models', nargs='+', choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument('--k', type=int, default=20)
    parser.add_argument('--plot', default='dino_photos.png')
    args = parser.parse_args()
    if args.epochs < 4 or args.epochs % 4:
        parser.error(f'--epochs must be a multiple of 4, but is {args.epochs}')
    return args


def train(config: str, work_dir: str, args: argparse.Namespace, seed: int) -> dict[int, float]:
    """Train, and return the accuracy by epoch; the RePa model's is that of its deploy form."""
    options = {
        'train_cfg.max_epochs': args.epochs,
        'default_hooks.checkpoint.interval': args.epochs // 4,
    }
    options.update({'randomness.seed': seed, 'train_dataloader.dataset.data_root': args.data})
    options['param_scheduler.1.end'] = args.epochs
    runner = runner_for_training(config, work_dir, cfg_options=options)
    runner.register_hook(SaveStart())
    runner.train()
    found = {}
    for epoch in (0, args.epochs // 4, args.epochs // 2, args.epochs):
        checkpoint = osp.join(work_dir, f'epoch_{epoch}.pth')
        data = {f'{split}_dataloader.dataset.data_root': args.data for split in ('train', 'test')}
        found[epoch] = knn_evaluate(config, checkpoint, k=[args.k], cfg_options=data)[args.k]
    return found


def plot(pixels: float, curves: dict[str, dict[int, float]], path: str, k: int) -> None:
    """Draw the accuracies by epoch, beside that of the pixels."""
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    axes.axhline(pixels, color='grey', linestyle=':', label='pixels')
    for name, found in curves.items():
        axes.plot(list(found), list(found.values()), marker='o', label=name)
    axes.set(xlabel='epoch', ylabel=f'accuracy of {k} nearest neighbours (%)', ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    args = parse_args()
    write_photos(args.data)
    data = {f'{split}_dataloader.dataset.data_root': args.data for split in ('train', 'test')}
    pixels = knn_evaluate(CONFIGS['vanilla'], None, 'pixels', [args.k], cfg_options=data)[args.k]
    print(f'pixels: {pixels:.1f} %', flush=True)
    curves = {}
    for seed in args.seeds:
        for name in args.models:
            start = time.perf_counter()
            work_dir = osp.join(args.work_dir, f'{name}_{seed}')
            curves[f'{name}, seed {seed}'] = found = train(CONFIGS[name], work_dir, args, seed)
            line = ', '.join(f'epoch {epoch}: {value:.1f} %' for epoch, value in found.items())
            minutes = (time.perf_counter() - start) / 60
            print(f'{name}, seed {seed}: {line} ({minutes:.1f} min)', flush=True)
    with open(osp.splitext(args.plot)[0] + '.json', 'w') as file:
        json.dump(dict(pixels=pixels, **curves), file, indent=1)
    plot(pixels, curves, args.plot, args.k)
    print(f'wrote {args.plot}')


if __name__ == '__main__':
    main()
