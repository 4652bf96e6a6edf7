"""Memory of tensors: peaks, weights, and what a backward pass needs."""

import os
from collections.abc import Callable

import torch
import torch.nn as nn


def weight_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def peak_bytes(function: Callable, argument, device='cpu') -> tuple[object, int]:
    """Call a function, and find how much its tensors take at most.

    On a GPU that is what CUDA's allocator reports; on a CPU it is added up from the allocations
    that PyTorch's profiler sees (not those inside other libraries, such as OpenCV). What was
    allocated before does not count.

    Returns:
        tuple: What the function returns, and bytes.
    """
    device = torch.device(device)
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = function(argument)
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    # The profiler reports on itself otherwise.
    os.environ.setdefault('KINETO_LOG_LEVEL', '99')
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        result = function(argument)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == '[memory]']
    # PyTorch changed the unit in 2.2.
    events.sort(key=lambda e: e.start_ns() if hasattr(e, 'start_ns') else e.start_us())
    allocated = peak = 0
    for event in events:
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return result, peak


class SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """A context manager for a forward pass: the ``bytes`` that it keeps for the backward pass.

    Each storage counts once. Parameters and buffers of ``model`` do not count.
    """

    def __init__(self, model: nn.Module) -> None:
        own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        self._sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                self._sizes[storage.data_ptr()] = storage.nbytes()
            # A tensor of its own: to keep an output itself would be a cycle.
            return tensor.detach()

        super().__init__(pack, lambda tensor: tensor)

    def __enter__(self) -> 'SavedTensors':
        super().__enter__()
        return self

    @property
    def bytes(self) -> int:
        return sum(self._sizes.values())
