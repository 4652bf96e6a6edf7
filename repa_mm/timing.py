"""The timer: callables in turn, in one process, the ratios of their times, and tables of them."""

import copy
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from mmengine.utils.dl_utils import collect_env
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table


def synchronize() -> None:
    """Wait for a GPU, if one is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def order_of_turn(names: Sequence[str], turn: int) -> list[str]:
    """Return the order in which callables run: rotated, and reversed every other time.

    No callable always runs first, or always after the same other one.
    """
    shift = turn // 2 % len(names)
    names = [*names[shift:], *names[:shift]]
    return names[::-1] if turn % 2 else names


def measure(calls: dict[str, Callable], argument: Any, repeats: int) -> dict[str, np.ndarray]:
    """Time callables in turn, so that other load on the machine slows all of them alike.

    Args:
        calls (dict): Callables of one argument, by name.
        argument (Any): The argument. Each call gets a copy, made outside of its time.
        repeats (int): Number of turns. One more before those does not count.

    Returns:
        dict: For each callable its times in milliseconds, (repeats, ).
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-1, repeats):
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


def compare(values: np.ndarray, reference: np.ndarray) -> tuple[float, float, float]:
    """Compute the ratio of two medians, with a confidence interval.

    The interval is that of a percentile bootstrap over *pairs*: the i-th times of both were
    measured one after the other. Another process may well find a ratio outside the interval.

    Args:
        values (np.ndarray): Times, (n, ).
        reference (np.ndarray): Times to divide by, (n, ).

    Returns:
        tuple: The ratio, and the bounds within which it lies with a confidence of 95 %.
    """
    chosen = np.random.default_rng(0).integers(0, len(values), (2000, len(values)))
    ratios = np.median(values[chosen], 1) / np.median(reference[chosen], 1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(np.median(values) / np.median(reference)), float(low), float(high)


def change(values: np.ndarray, reference: np.ndarray) -> str:
    """Return the change of the median in percent, with its interval: '-40.0 % [-41.2, -38.9]'."""
    ratio, low, high = (100 * (value - 1) for value in compare(values, reference))
    return f'{ratio:+.1f} % [{low:+.1f}, {high:+.1f}]'


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table; the first column holds names."""
    table = Table(box=MARKDOWN)
    for i, column in enumerate(columns):
        table.add_column(column, justify='right' if i else 'left', no_wrap=True)
    for row in rows:
        table.add_row(*row)
    print(f'\n{title}')
    Console(width=200).print(table)


def show_machine() -> None:
    """Print what MMEngine finds out about the machine and its software."""
    for key, value in collect_env().items():
        if key != 'PyTorch compiling details':  # which are longer than all else
            print(f'{key}: {value}')
    print(f'Threads: {torch.get_num_threads()}')
