"""The machine that a measurement is taken on: its description, checks and settings."""

import os
import platform
import sys
import time
from importlib import import_module
from typing import Any

import torch
import torch.nn as nn

from repa_mm.version import __version__

AMP_DTYPES = dict(bf16=torch.bfloat16, fp16=torch.float16)
PACKAGES = ('torchvision', 'mmengine', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain', 'numpy')
# Of environment variables, those that decide how memory is allocated and threads are used.
VARIABLES = ('MALLOC_', 'GLIBC_TUNABLES', 'LD_PRELOAD', 'THP_', 'OMP_', 'GOMP_', 'KMP_', 'MKL_')
HUGE_PAGES = '/sys/kernel/mm/transparent_hugepage/enabled'


def environment(device: str = 'cpu') -> dict[str, Any]:
    """What a measurement depends on: the machine, its settings and all versions."""
    device = torch.device(device)
    versions = dict(repa_mm=__version__, python=platform.python_version(), torch=torch.__version__)
    for name in PACKAGES:
        try:
            versions[name] = import_module(name).__version__
        except ImportError:
            versions[name] = None
    cpu = [line for line in _read('/proc/cpuinfo').splitlines() if line.startswith('model name')]
    result = dict(
        time=time.strftime('%Y-%m-%d %H:%M:%S %z'),
        command=['python', *sys.argv],
        platform=platform.platform(),
        cpu=cpu[0].partition(':')[2].strip() if cpu else platform.processor() or platform.machine(),
        cpu_count=os.cpu_count(),
        threads=torch.get_num_threads(),
        variables={k: v for k, v in os.environ.items() if k.startswith(VARIABLES)},
        huge_pages=_read(HUGE_PAGES).strip() or None,
        load=os.getloadavg()[0] if hasattr(os, 'getloadavg') else None,
        device=str(device),
        tf32=torch.backends.cuda.matmul.allow_tf32,
        versions=versions,
    )
    if device.type == 'cuda':
        properties = torch.cuda.get_device_properties(device)
        result.update(
            gpu=properties.name,
            gpu_memory_gib=properties.total_memory / 2**30,
            cuda=torch.version.cuda,
            cudnn=torch.backends.cudnn.version(),
        )
    return result


def _read(path: str) -> str:
    try:
        with open(path, encoding='utf-8') as file:
            return file.read()
    except OSError:
        return ''


def machine(environment: dict[str, Any]) -> str:
    """The machine of an :func:`environment`, in a line."""
    threads = environment['threads']
    name = environment.get('gpu') or f'{environment["cpu"]}, {threads} thread{"s" * (threads > 1)}'
    return f'{name}, PyTorch {environment["versions"]["torch"]}'


def check_device(device: str, amp: str | None = None) -> torch.device:
    """The device of that name; a ValueError if it is not there or does not compute in that type."""
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f'unknown device {device!r}: use cpu, cuda or cuda:1') from error
    if found.type == 'meta':
        raise ValueError("the device 'meta' computes nothing: use cpu or cuda")
    count = torch.cuda.device_count()
    if found.type == 'cuda' and (found.index or 0) >= count:
        raise ValueError(
            f'there is no device {device!r}: PyTorch sees {count} GPUs; use --device cpu'
        )
    if amp:
        # Which types a CPU's convolutions take depends on PyTorch's version.
        try:
            with torch.no_grad(), torch.autocast(found.type, AMP_DTYPES[amp]):
                conv = nn.Conv2d(3, 8, 3).to(found)
                nn.GELU()(conv(torch.rand(1, 3, 8, 8, device=found)))
        except RuntimeError as error:
            other = 'bf16' if amp == 'fp16' else 'fp16'
            raise ValueError(
                f'--amp {amp} does not run on {device} with '
                f'PyTorch {torch.__version__}; try --amp {other}'
            ) from error
    return found


def set_machine(
    device: str, threads: int | None = None, tf32: bool = False, amp: str | None = None
) -> None:
    """Set the process's threads and TF32; a ValueError if the device is not as asked for."""
    if threads is not None:
        most = 8 * (os.cpu_count() or 1)
        if not 1 <= threads <= most:
            raise ValueError(f'--threads must be from 1 to {most}, 8 for each core of this machine')
        torch.set_num_threads(threads)
    found = check_device(device, amp)
    if tf32 and found.type != 'cuda':
        raise ValueError('--tf32 is about NVIDIA GPUs: use it with --device cuda')
    # Both, since PyTorch's own defaults differ: off, and on for convolutions.
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
