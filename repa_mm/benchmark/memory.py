"""The memory that a model takes."""

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import torch


def peak_memory(call: Callable[[], Any], device: str = 'cpu') -> tuple[Any, float | None]:
    """Return what a function returns, and how many MB the memory of the process rises meanwhile.

    On a GPU, it is the memory of PyTorch's tensors there. None stands for a system that does not
    tell: Linux has a peak of resident memory that can be reset.
    """
    gc.collect()
    if torch.device(device).type == 'cuda':
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = call()
        return result, (torch.cuda.max_memory_allocated(device) - before) / 1e6
    try:
        ctypes.CDLL(None).malloc_trim(0)  # holes of the heap would serve the call
        with open('/proc/self/clear_refs', 'w') as file:
            file.write('5')
        before = _resident('VmRSS')
        is_reset = _resident('VmHWM') < before + 10
    except (OSError, AttributeError, StopIteration):
        is_reset = False
    result = call()
    return result, _resident('VmHWM') - before if is_reset else None


def _resident(name: str) -> float:
    with open('/proc/self/status') as file:
        return next(int(line.split()[1]) / 1e3 for line in file if line.startswith(f'{name}:'))
