"""The timer: callables in turn, in one process, and the ratios of their times."""

import copy
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch


def synchronize() -> None:
    """Wait for a GPU, if one is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def order_of_turn(names: Sequence[str], turn: int) -> list[str]:
    """Return the order in which callables run: rotated, and reversed every other time.

    So none always runs first, or always after the same other one.
    """
    shift = turn // 2 % len(names)
    names = [*names[shift:], *names[:shift]]
    return names[::-1] if turn % 2 else names


def measure(
    calls: dict[str, Callable], argument: Any, repeats: int, warmup: int = 1
) -> dict[str, np.ndarray]:
    """Time callables in turn, so that whatever else the machine does meets all of them alike.

    Args:
        calls (dict): Callables of one argument, by name.
        argument (Any): The argument. Each call gets a copy, made outside of its time.
        repeats (int): Number of turns to measure.
        warmup (int): Number of turns before those. Defaults to 1.

    Returns:
        dict: For each callable its times in milliseconds, (repeats, ).
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-warmup, repeats):
        for name in order_of_turn(list(calls), turn):
            own = copy.deepcopy(argument)
            gc.disable()
            synchronize()
            begin = time.perf_counter()
            try:
                calls[name](own)
                synchronize()
                if turn >= 0:
                    times[name].append(1e3 * (time.perf_counter() - begin))
            finally:
                gc.enable()
    return {name: np.array(values) for name, values in times.items()}


def compare(
    values: np.ndarray, reference: np.ndarray, resamples: int = 2000
) -> tuple[float, float, float]:
    """Compute the ratio of two medians, with a confidence interval.

    The interval is that of a percentile bootstrap over *pairs*: the i-th times of both were
    measured one after the other. It says nothing about what another process would find: for that,
    run the tool again.

    Args:
        values (np.ndarray): Times, (n, ).
        reference (np.ndarray): Times to divide by, (n, ).
        resamples (int): Of the bootstrap. Defaults to 2000.

    Returns:
        tuple: The ratio, and the bounds within which it lies with a confidence of 95 %.
    """
    chosen = np.random.default_rng(0).integers(0, len(values), (resamples, len(values)))
    ratios = np.median(values[chosen], 1) / np.median(reference[chosen], 1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(np.median(values) / np.median(reference)), float(low), float(high)
