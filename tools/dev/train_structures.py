"""Small models of every structure against the ordinary ones, on scans of digits.

All models of a table are trained for the same number of iterations. Schedules end during the
training; the accuracy is that of the merged model. The data is scikit-learn's (1,797 scans of 8 x 8
pixels, 500 of them for testing).

    python tools/dev/train_structures.py depth --seeds 0 1 2
    python tools/dev/train_structures.py width
    python tools/dev/train_structures.py mixers
"""

import argparse
import os
import statistics
import tempfile
import time
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.logging import MMLogger
from mmpretrain.models import PoolFormer, VisionTransformer
from sklearn.datasets import load_digits

from repa_mm.engine import (
    DecayActivationsHook,
    DecayLayerNormsHook,
    ImitateMixersHook,
    JoinBranchesHook,
)
from repa_mm.models import (
    AffineRIFormer,
    ExpertsVisionTransformer,
    ParallelVisionTransformer,
    ProgressiveVisionTransformer,
    RePaVisionTransformer,
)
from repa_mm.reparam import average_experts, has_training_form, reparameterize, set_lam

LAYERS, BATCH = 12, 64
FROM_TEACHER, IMITATING = 'RIFormer from the PoolFormer', 'the same, which imitates it'
VIT = dict(img_size=8, patch_size=2, in_channels=1, out_type='avg_featmap', final_norm=False)
POOL = dict(
    in_patch_size=3,
    in_stride=2,
    in_pad=1,
    arch=dict(
        layers=[3, 3, 1, 1],
        embed_dims=[24, 28, 30, 32],
        mlp_ratios=[2, 2, 2, 2],
        layer_scale_init_value=0.1,
    ),
)


class Classifier(nn.Module):
    """A backbone and a linear layer on its mean features."""

    def __init__(self, backbone: nn.Module, width: int) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.backbone(images)[-1]
        return self.head(features.flatten(2).mean(2) if features.ndim == 4 else features)

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> dict:
        return dict(loss=F.cross_entropy(self(images), labels))


def load() -> tuple[torch.Tensor, ...]:
    """Images (N, 1, 8, 8) and labels, for training and for testing, the same in every run."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return images[500:], labels[500:], images[:500], labels[:500]


def shifted(images: torch.Tensor) -> torch.Tensor:
    """The images, each moved by up to one pixel."""
    padded = F.pad(images, (1, 1, 1, 1), value=-1)
    rows, columns = torch.randint(3, (2, len(images), 1)) + torch.arange(8)
    n = torch.arange(len(images))[:, None, None]
    return padded[n, 0, rows[:, :, None], columns[:, None]][:, None]


def vit(args, kind=VisionTransformer, num_layers: int = LAYERS, **kwargs) -> nn.Module:
    arch = dict(
        embed_dims=args.width,
        num_layers=num_layers,
        num_heads=4,
        feedforward_channels=2 * args.width,
    )
    return kind(arch, **VIT, **kwargs)


def tables(args) -> dict[str, dict[str, tuple]]:
    """For every model the function that builds it, and what is done before and after each step."""
    whole = args.iterations
    norms = DecayLayerNormsHook(warmup=int(0.6 * whole))
    activations = DecayActivationsHook(warmup=int(0.6 * whole))
    branches = JoinBranchesHook(warmup=int(0.4 * whole))
    progressive = partial(vit, args, ProgressiveVisionTransformer)
    experts = partial(vit, args, ExpertsVisionTransformer, num_experts=4)

    def parallel(n: int) -> nn.Module:
        return vit(args, ParallelVisionTransformer, LAYERS // n, num_branches=n)

    def average(model: nn.Module) -> None:
        average_experts(model, args.rate)

    depth = {'12 x 1, ordinary': (partial(vit, args), [], None)}
    for n in (2, 3, 4):
        depth[f'{LAYERS // n} x {n}'] = partial(parallel, n), [branches], None
    return dict(
        depth=depth,
        width={
            'ordinary': (partial(vit, args), [], None),
            'progressive norms': (progressive, [norms], None),
            'channel idle': (partial(vit, args, RePaVisionTransformer), [], None),
            'channel idle, progressive norms': (
                partial(progressive, idle_ratio=0.75), [norms], None,
            ),
            'the same, progressive activations': (
                partial(progressive, idle_ratio=0.75, progressive_activations=True),
                [norms, activations], None,
            ),
            '4 experts': (experts, [], average),
            '4 channel-idle experts': (partial(experts, idle_ratio=0.75), [], average),
        },
        mixers={
            name: (partial(kind, **POOL), [], None)
            for name, kind in (
                ('PoolFormer', PoolFormer),
                ('RIFormer', AffineRIFormer),
                (FROM_TEACHER, AffineRIFormer),
                (IMITATING, AffineRIFormer),
            )
        },
    )  # fmt: skip


def train(
    name: str, how: tuple, seed: int, args, teacher: Classifier | None
) -> tuple[float, float, nn.Module]:
    """Accuracy of the merged model, how far merging moves its logits, and the trained model."""
    torch.manual_seed(seed)
    build, hooks, after = how
    backbone = build()
    backbone.init_weights()
    model = Classifier(backbone, args.width)
    runner = SimpleNamespace(model=model)
    imitation = None
    if teacher is not None and name in (FROM_TEACHER, IMITATING):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, 'teacher.pth')
            torch.save(teacher.backbone.state_dict(), path)
            backbone.load_state_dict(torch.load(path), strict=False)
            if name == IMITATING:
                imitation = ImitateMixersHook(dict(type='mmpretrain.PoolFormer', **POOL), path)
                imitation.before_train(runner)
    model.train()
    parameters = [*model.parameters()]
    optimizer = torch.optim.AdamW(parameters, args.lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, args.iterations, pct_start=0.1
    )
    images, labels, test_images, test_labels = load()
    channels = 3 if args.table == 'mixers' else 1  # PoolFormers take images in color
    for i in range(args.iterations):
        for hook in hooks:
            set_lam(model, hook.lam_at(i), hook.kind, hook.what)
        chosen = torch.randint(len(labels), (BATCH,))
        batch = shifted(images[chosen]) if args.shift else images[chosen]
        batch = batch.expand(-1, channels, -1, -1)
        if imitation:
            imitation.before_train_iter(runner, i)
        loss = sum(model.loss(batch, labels[chosen]).values())
        if imitation:
            imitation.after_train_iter(runner, i)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if after:
            after(model)
    model.eval()
    test_images = test_images.expand(-1, channels, -1, -1)
    merged = reparameterize(model) if has_training_form(model) else model
    with torch.no_grad():
        before, logits = model(test_images), merged(test_images)
    error = ((logits - before).abs().max() / before.abs().max()).item()
    return 100 * (logits.argmax(1) == test_labels).float().mean().item(), error, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('table', choices=['depth', 'width', 'mixers'])
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    parser.add_argument('--iterations', type=int, default=500)
    parser.add_argument('--width', type=int, default=32)
    parser.add_argument('--lr', type=float, default=2e-3, help='the highest learning rate')
    parser.add_argument('--rate', type=float, default=0.01, help='of averaging experts')
    parser.add_argument('--shift', action='store_true', help='move images by up to one pixel')
    parser.add_argument('--models', nargs='+', help='names of some models of the table')
    args = parser.parse_args()
    MMLogger.get_current_instance().setLevel('WARNING')  # of where weights are from
    print('| model | accuracy by seed | mean | spread | largest error of merging |')
    print('| --- | --- | --- | --- | --- |', flush=True)
    start, teachers = time.time(), [None] * len(args.seeds)
    for name, how in tables(args)[args.table].items():
        if args.models and name not in args.models:
            continue
        runs = [train(name, how, seed, args, t) for seed, t in zip(args.seeds, teachers)]
        if name == 'PoolFormer':
            teachers = [model for _, _, model in runs]
        accuracies = [accuracy for accuracy, _, _ in runs]
        spread = statistics.stdev(accuracies) if len(runs) > 1 else 0
        print(
            f'| {name} | {", ".join(f"{a:.1f}" for a in accuracies)} '
            f'| {statistics.mean(accuracies):.2f} | {spread:.2f} '
            f'| {max(error for _, error, _ in runs):.0e} |',
            flush=True,
        )
    print(f'{time.time() - start:.0f} s')


if __name__ == '__main__':
    main()
