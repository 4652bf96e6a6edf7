"""Small ViTs with parallel branches against the ordinary one, on scans of digits.

Twelve layers in blocks of 1, 2, 3 or 4 branches are trained for the same number of iterations. The
branches are joined in the first part of the training and merged at its end; the accuracy is that of
the merged model. The data is scikit-learn's (1,797 scans of 8 x 8 pixels, 500 of them for testing).

    python tools/dev/train_branches.py --seeds 0 1 2
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from mmengine.logging import MMLogger
from mmpretrain.models import VisionTransformer
from sklearn.datasets import load_digits

from repa_mm.engine import JoinBranchesHook
from repa_mm.models import ParallelVisionTransformer
from repa_mm.reparam import join_branches, reparameterize

LAYERS, BATCH = 12, 64
COMMON = dict(img_size=8, patch_size=2, in_channels=1, out_type='avg_featmap', final_norm=False)


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


def train(
    num_branches: int, seed: int, iterations: int, width: int, shift: bool
) -> tuple[float, float]:
    """Accuracy of the merged model, and how far its logits are from those before merging."""
    torch.manual_seed(seed)
    arch = dict(
        embed_dims=width,
        num_layers=LAYERS // num_branches,
        num_heads=4,
        feedforward_channels=2 * width,
    )
    if num_branches == 1:
        backbone = VisionTransformer(arch, **COMMON)
    else:
        backbone = ParallelVisionTransformer(arch, num_branches=num_branches, **COMMON)
    backbone.init_weights()
    head = torch.nn.Linear(width, 10)
    backbone.train()
    parameters = [*backbone.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, 2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, iterations, pct_start=0.1)
    hook = JoinBranchesHook(warmup=int(0.4 * iterations))
    images, labels, test_images, test_labels = load()
    for i in range(iterations):
        if num_branches > 1:
            join_branches(backbone, hook.lam_at(i))
        chosen = torch.randint(len(labels), (BATCH,))
        batch = shifted(images[chosen]) if shift else images[chosen]
        loss = F.cross_entropy(head(backbone(batch)[-1]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    backbone.eval()
    merged = reparameterize(backbone) if num_branches > 1 else backbone
    with torch.no_grad():
        before, logits = (head(model(test_images)[-1]) for model in (backbone, merged))
    error = ((logits - before).abs().max() / before.abs().max()).item()
    return 100 * (logits.argmax(1) == test_labels).float().mean().item(), error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    parser.add_argument('--iterations', type=int, default=500)
    parser.add_argument('--width', type=int, default=32)
    parser.add_argument('--shift', action='store_true', help='move images by up to one pixel')
    parser.add_argument('--branches', type=int, nargs='+', default=[1, 2, 3, 4])
    args = parser.parse_args()
    MMLogger.get_current_instance().setLevel('WARNING')  # of where weights are from
    print('| blocks x branches | accuracy by seed | mean | spread | largest error of merging |')
    print('| --- | --- | --- | --- | --- |', flush=True)
    start = time.time()
    for num_branches in args.branches:
        settings = args.iterations, args.width, args.shift
        runs = [train(num_branches, seed, *settings) for seed in args.seeds]
        accuracies = [accuracy for accuracy, _ in runs]
        print(
            f'| {LAYERS // num_branches} x {num_branches} '
            f'| {", ".join(f"{a:.1f}" for a in accuracies)} | {statistics.mean(accuracies):.2f} '
            f'| {statistics.stdev(accuracies) if len(accuracies) > 1 else 0:.2f} '
            f'| {max(error for _, error in runs):.0e} |',
            flush=True,
        )
    print(f'{time.time() - start:.0f} s')


if __name__ == '__main__':
    main()
