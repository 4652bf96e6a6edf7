"""Memory and latency of one process over a long time.

The script trains, validates and tests a small RePa-Swin in cycles through MMEngine's Runner, and
merges a copy each time. Then it runs the deploy form on images of changing sizes. It prints what
should not grow.
"""

import argparse
import ctypes
import gc
import logging
import random
import statistics
import tempfile
import time

import torch
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import Runner
from torch.utils.data import Dataset

import repa_mm
from repa_mm.models.surgery import window_attention as attention
from repa_mm.models.surgery import windows

MODEL = dict(
    type='ImageClassifier',
    backbone=dict(
        type='RePaSwinTransformer',
        arch=dict(embed_dims=16, depths=[2, 2], num_heads=[2, 4]),
        window_size=4,
        pad_small_map=True,
        out_indices=(1,),
    ),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(type='LinearClsHead', num_classes=2, in_channels=32),
)


class Noise(Dataset):
    """Images of noise, bright ones and dark ones."""

    metainfo = dict(classes=('dark', 'bright'))

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict:
        from mmpretrain.structures import DataSample

        image = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(index))
        return dict(inputs=image + index % 2, data_samples=DataSample().set_gt_label(index % 2))


def resident_mib() -> float:
    """Memory of this process, after what is free was given back."""
    gc.collect()
    try:
        ctypes.CDLL('libc.so.6').malloc_trim(0)
    except OSError:
        pass
    with open('/proc/self/statm') as file:
        return int(file.read().split()[1]) * 4096 / 2**20


def train_in_cycles(cycles: int) -> None:
    """Each cycle: 4 iterations, a validation and a test, both merged."""
    loader = dict(
        batch_size=4,
        dataset=Noise(),
        sampler=dict(type='DefaultSampler', shuffle=True),
        collate_fn=dict(type='default_collate'),
    )
    with tempfile.TemporaryDirectory() as work_dir:
        runner = Runner(
            model=MODEL,
            work_dir=work_dir,
            default_scope='mmpretrain',
            **{f'{split}_dataloader': loader for split in ('train', 'val', 'test')},
            **{f'{split}_evaluator': dict(type='Accuracy') for split in ('val', 'test')},
            train_cfg=dict(by_epoch=True, max_epochs=cycles, val_interval=1),
            val_cfg=dict(),
            test_cfg=dict(),
            optim_wrapper=dict(optimizer=dict(type='AdamW', lr=1e-4)),
            default_hooks=dict(
                checkpoint=dict(type='SafeCheckpointHook', interval=10, max_keep_ckpts=1)
            ),
            custom_hooks=[dict(type='ReparameterizeHook', when=('val', 'test'))],
            log_level='ERROR',
        )
        report = max(cycles // 5, 1)

        class Report(repa_mm.engine.reparameterize.Hook):
            priority = 'LOWEST'
            since = time.perf_counter()

            def after_val_epoch(self, runner, metrics=None):
                runner.test_loop.run()  # in the middle of the training
                if runner.epoch % report == 0:
                    now = time.perf_counter()
                    done = f'{4 * runner.epoch:6} iterations, {runner.epoch} validations and tests'
                    each = f'{(now - self.since) / report * 1e3:.0f} ms a cycle'
                    print(f'{done}: {resident_mib():7.1f} MiB, {each}', flush=True)
                    self.since = now

        runner.register_hook(Report())
        runner.train()


@torch.no_grad()
def infer(number: int, seed: int) -> None:
    """Deploy form, on images of 32 to 256 pixels a side."""
    model = repa_mm.reparameterize(MODELS.build(MODEL).eval())
    generator = random.Random(seed)
    probe = torch.randn(1, 3, 128, 128)
    report = max(number // 5, 1)
    latencies = []
    for i in range(1, number + 1):
        height, width = (generator.randrange(32, 257) for _ in range(2))
        model(torch.randn(1, 3, height, width), mode='tensor')
        start = time.perf_counter()
        model(probe, mode='tensor')
        latencies.append(time.perf_counter() - start)
        if i % report == 0:
            info = windows.partition.cache_info()
            latency = f'128x128 in {statistics.median(latencies) * 1e3:.2f} ms'
            print(
                f'{i:6} inferences of changing size: {resident_mib():7.1f} MiB, {latency}, '
                f'{info.currsize} of at most {info.maxsize} window partitions and '
                f'{len(attention._BIASES)} biases cached',
                flush=True,
            )
            latencies.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--cycles', type=int, default=250)
    parser.add_argument('--inferences', type=int, default=10000)
    parser.add_argument('--seed', type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    logging.disable(logging.WARNING)
    init_default_scope('mmpretrain')
    train_in_cycles(args.cycles)
    infer(args.inferences, args.seed)


if __name__ == '__main__':
    main()
