"""The share of FFNs in the time of a forward pass (figure 3 of the paper)."""

import time
from collections.abc import Callable

import numpy as np
import torch.nn as nn

from repa_mm.benchmark.timing import measure, synchronize

# In a block of a MetaFormer, the names of what mixes tokens, and of the FFN and the norm before it.
TOKEN_MIXERS = {'attn', 'token_mixer', 'token_mix'}
FFNS = {'ffn', 'channel_mix', 'mlp', 'norm2', 'ln2'}


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


def measure_shares(
    backbones: dict[str, nn.Module], images, repeats: int, warmup: int = 1
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Time backbones in turn, with timers around their FFNs.

    Args:
        backbones (dict): In eval mode, by name.
        images (Tensor): (B, 3, H, W).
        repeats (int): Number of turns.
        warmup (int): Number of turns before those. Defaults to 1.

    Returns:
        tuple: For each backbone its times, and those of its FFNs, in milliseconds, (repeats, ).
    """
    spent: dict[str, list[float]] = {name: [] for name in backbones}

    def timed(name: str, backbone: nn.Module) -> Callable:
        def before(*_) -> None:
            synchronize()
            spent[name][-1] -= 1e3 * time.perf_counter()

        def after(*_) -> None:
            synchronize()
            spent[name][-1] += 1e3 * time.perf_counter()

        for module in ffn_modules(backbone):
            module.register_forward_pre_hook(before)
            module.register_forward_hook(after)

        def run(images) -> None:
            spent[name].append(0.0)
            backbone(images)

        return run

    calls = {name: timed(name, backbone) for name, backbone in backbones.items()}
    times = measure(calls, images, repeats, warmup)
    return times, {name: np.array(values[warmup:]) for name, values in spent.items()}
