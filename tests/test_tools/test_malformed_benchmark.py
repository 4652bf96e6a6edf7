"""Malformed input for benchmark.py, benchmark_training.py and profile_latency.py of tools/."""

import pytest

# Identifier: (command line, what the message says).
ROWS = {
    'noise, as a zip': (
        lambda c: c.benchmark(checkpoint='zip_noise.pth'),
        'zip_noise.pth.* truncated',
    ),
    'baseline that is none': (
        lambda c: c.benchmark(
            '--synthetic',
            '64x64',
            '--baseline',
            c / 'vanilla.py',
            '--baseline-checkpoint',
            c / 'good.pth',
        ),
        'good.pth',
    ),
    'image missing, to measure with': (
        lambda c: c.benchmark('--cfg-options', *c.coco(None, [None])),
        'cannot load',
    ),
    'read-only': (
        lambda c: c.benchmark('--synthetic', '64x64', '--out', '/proc/none/out.json'),
        "cannot write to '/proc/none'",
    ),
    **{
        f'size {size}': (lambda c, size=size: c.benchmark('--synthetic', size), message)
        for size, message in (
            ('0x0', "'0x0' is no size"),
            ('abc', "'abc' is no size"),
            ('-1', 'no size|expected one argument'),
            ('64', 'no size'),
            ('1000000x1000000', 'GiB of memory'),
        )
    },
    **{
        f'sweep {sweep!r}': (
            lambda c, sweep=sweep: c.benchmark('--synthetic', '64x64', '--sweep', sweep),
            '--sweep',
        )
        for sweep in ('', 'batch=', 'batch=0', 'batch=²', 'weight=3', 'idle-ratio=nan')
    },
    **{
        f'measuring with {" ".join(options)}': (
            lambda c, options=options: c.benchmark('--synthetic', '64x64', *options),
            message,
        )
        for options, message in (
            (['--threads', '0'], '--threads must be'),
            (['--threads', '1000000'], '--threads must be'),
            (['--amp', 'fp8'], 'fp8'),
            (['--device', 'abc'], "'abc'"),
            (['--device', 'meta'], 'meta'),
            (['--device', 'cuda:99'], 'cuda:99'),
            (['--batch-size', '0'], '--batch-size'),
            (['--batch-size', '1000000'], 'GiB of memory'),
            (['--num-images', '-5'], '--num-images'),
            (['--warmup', '-5'], '--warmup'),
            (['--plot', 'out.xyz'], 'out.xyz'),
        )
    },
    'baseline of another task': (
        lambda c: c.benchmark('--synthetic', '64x64', '--baseline', c / 'segmentor.py'),
        'mmseg',
    ),
    'baseline is a RePa model': (
        lambda c: c.benchmark('--synthetic', '64x64', '--baseline', c / 'detector.py'),
        'baseline',
    ),
    'vanilla, to train': (
        lambda c: ['benchmark_training', c / 'vanilla.py', '--size', '64x64'],
        'no channel-idle FFN',
    ),
    'size to train': (
        lambda c: ['benchmark_training', c / 'detector.py', '--size', '1x'],
        'no size',
    ),
    'batch to train': (
        lambda c: ['benchmark_training', c / 'detector.py', '--batch-size', '99999999'],
        'GiB of memory',
    ),
    'size to profile': (
        lambda c: ['profile_latency', c / 'detector.py', '--size', 'big'],
        'no size',
    ),
    'nothing to profile': (lambda c: ['profile_latency', c / 'none.py'], 'none.py'),
}


@pytest.mark.parametrize('row', ROWS)
def test_malformed(row, refused):
    refused(*ROWS[row])
