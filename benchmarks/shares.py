"""The shares of parts of a model in the time of a forward pass (figure 3 of the paper)."""

import time
from collections.abc import Callable
from fnmatch import fnmatchcase

import numpy as np
import torch.nn as nn

from repa_mm.benchmark.timing import measure, synchronize

# In a block of a MetaFormer, the names of what mixes tokens, and of the FFN and the norm before it.
TOKEN_MIXERS = {'attn', 'token_mixer', 'token_mix'}
FFNS = {'ffn', 'channel_mix', 'mlp', 'norm2', 'ln2'}
# The parts of a detector, by patterns of their names. What is left computes queries and boxes.
PARTS = {
    'backbone': 'backbone',
    'neck': 'neck',
    "encoder's attention": 'encoder.layers.*.self_attn',
    "encoder's FFNs": 'encoder.layers.*.ffn',
    'decoder': 'decoder',
    'head': 'bbox_head',
}


def ffn_modules(backbone: nn.Module) -> list[nn.Module]:
    """Return the FFNs of a MetaFormer backbone, and the norms before them.

    Raises:
        ValueError: If the backbone has no blocks of a token mixer and an FFN.
    """
    found = []
    for block in backbone.modules():
        children = dict(block.named_children())
        if TOKEN_MIXERS & set(children):
            found += [child for name, child in children.items() if name in FFNS]
    if not found:
        raise ValueError(f'{type(backbone).__name__} has no blocks of a token mixer and an FFN')
    return found


def detector_parts(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the modules of a detector's :data:`PARTS`, of those that it has."""
    found = {
        part: [m for name, m in model.named_modules() if fnmatchcase(name, pattern)]
        for part, pattern in PARTS.items()
    }
    return {part: modules for part, modules in found.items() if modules}


def measure_shares(
    calls: dict[str, Callable],
    parts: dict[str, dict[str, list[nn.Module]]],
    argument,
    repeats: int,
    warmup: int = 1,
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
    """Time models in turn, with timers around some of their modules.

    Args:
        calls (dict): Run the models, by name.
        parts (dict): For each of them its modules in eval mode, by the name of their part.
        argument (Any): Of the calls.
        repeats (int): Number of turns.
        warmup (int): Number of turns before those. Defaults to 1.

    Returns:
        tuple: For each model its times, and those of its parts, in milliseconds, (repeats, ).
    """
    spent = {name: {part: [] for part in modules} for name, modules in parts.items()}

    def timed(name: str) -> Callable:
        def count(values: list[float], sign: int) -> None:
            synchronize()
            values[-1] += sign * 1e3 * time.perf_counter()

        for part, modules in parts[name].items():
            for module in modules:
                values = spent[name][part]
                module.register_forward_pre_hook(lambda *_, values=values: count(values, -1))
                module.register_forward_hook(lambda *_, values=values: count(values, 1))

        def run(argument) -> None:
            for values in spent[name].values():
                values.append(0.0)
            calls[name](argument)

        return run

    times = measure({name: timed(name) for name in calls}, argument, repeats, warmup)
    return times, {
        name: {part: np.array(values[warmup:]) for part, values in found.items()}
        for name, found in spent.items()
    }
