"""Timing callables in turn in one process, and tables of the results."""

import copy
import gc
import io
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from mmengine.utils.dl_utils import collect_env
from rich.box import MARKDOWN, Box
from rich.console import Console
from rich.table import Table

#: Seconds before a measured call in which the same callable runs unmeasured. On a CPU, threads of
#: the runtime before it wait actively for a while: without a pause, calls of 30 ms seemed to take
#: up to 70.
SETTLE = 0.1


def synchronize() -> None:
    """Wait for the GPU if one is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def order_of_turn(names: Sequence[str], turn: int) -> list[str]:
    """Return the names in the order of a turn: rotated, and reversed in every other turn.

    So no callable always runs first, or always after the same callable.
    """
    shift = turn // 2 % len(names)
    names = [*names[shift:], *names[:shift]]
    return names[::-1] if turn % 2 else names


def measure(
    calls: dict[str, Callable],
    argument: Any,
    repeats: int,
    seconds: float = math.inf,
    settle: float = SETTLE,
    per_turn: bool = False,
    note: Callable[[str, Any], None] | None = None,
) -> dict[str, np.ndarray]:
    """Time callables in turn, so that other load on the machine affects all of them alike.

    A callable runs unmeasured for ``settle`` seconds before each measured call, unless one call
    takes longer than that.

    Args:
        calls (dict): Callables with one argument, by name.
        argument (Any): The argument. Each call gets a copy, which is made outside the timed part.
        repeats (int): Number of turns. An additional turn for warm-up is not counted.
        seconds (float): After so many seconds no turn begins, except for the first three. Defaults
            to infinity.
        settle (float): Seconds of unmeasured calls. Defaults to :data:`SETTLE`.
        per_turn (bool): ``argument`` is a list that has an argument for each turn, and begins again
            at its end. Unmeasured calls have that of the turn before: a measured call may be the
            first with an image of this size, which some runtimes compile for. Defaults to False.
        note (Callable, optional): Gets the name and the result of each measured call.

    Returns:
        dict: The times of each callable in milliseconds, one for each turn.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    took: dict[str, float] = {}
    stop = time.perf_counter() + seconds
    arguments = argument if per_turn else [argument]
    for turn in range(-1, repeats):
        if turn >= 3 and time.perf_counter() > stop:
            break
        before, argument = (arguments[i % len(arguments)] for i in (turn - 1, turn))
        for name in order_of_turn(list(calls), turn):
            end = time.perf_counter() + settle
            while took.get(name, settle) < settle and time.perf_counter() < end:
                calls[name](copy.deepcopy(before))
                synchronize()
            own = copy.deepcopy(argument)
            gc.disable()
            synchronize()
            begin = time.perf_counter()
            try:
                result = calls[name](own)
                synchronize()
                took[name] = time.perf_counter() - begin
                if turn >= 0:
                    times[name].append(1e3 * took[name])
                    if note:
                        note(name, result)
            finally:
                gc.enable()
    return {name: np.array(values) for name, values in times.items()}


def compare(values: np.ndarray, reference: np.ndarray) -> tuple[float, float, float]:
    """Compute the ratio of two medians and its 95 % confidence interval.

    The interval is from a percentile bootstrap over *pairs*, since the i-th of the times (n, ) were
    measured in the same turn. With fewer than six pairs it is the least and the largest ratio of a
    pair. The ratio in another process may well lie outside the interval.
    """
    ratio = float(np.median(values) / np.median(reference))
    if len(values) < 6:
        pairs = values / reference
        return ratio, min(ratio, float(pairs.min())), max(ratio, float(pairs.max()))
    drawn = np.random.default_rng(0).integers(len(values), size=(2000, len(values)))
    ratios = np.median(values[drawn], 1) / np.median(reference[drawn], 1)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return ratio, float(low), float(high)


def change(values: np.ndarray, reference: np.ndarray) -> str:
    """Format the change of the median with its interval, such as '-40.0 % [-41.2, -38.9]'."""
    ratio, low, high = (100 * (value - 1) for value in compare(values, reference))
    return f'{ratio:+.1f} % [{low:+.1f}, {high:+.1f}]'


def duration(seconds: float) -> str:
    """Format a time, such as '41 s' or '12 min'."""
    return f'{seconds:.0f} s' if seconds < 59.5 else f'{seconds / 60:.0f} min'


def formatted(
    columns: Sequence[str], rows: Sequence[Sequence[str]], box: Box | None = MARKDOWN
) -> str:
    """Format a table, in Markdown or without lines. Columns with words are at the left."""
    table, text = Table(box=box, pad_edge=box is not None), io.StringIO()
    for i, column in enumerate(columns):
        words = not i or any(row[i][:1].isalpha() for row in rows)
        table.add_column(column, justify='left' if words else 'right', no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(file=text, width=2000).print(table)
    lines = (line.rstrip() for line in text.getvalue().splitlines())
    return '\n'.join(line for line in lines if line)


def show(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], box: Box | None = MARKDOWN
) -> None:
    """Print a table, see :func:`formatted`."""
    print(f'\n{title}\n\n{formatted(columns, rows, box)}\n')


def show_machine() -> None:
    """Print MMEngine's summary of the machine and its software."""
    for key, value in collect_env().items():
        if key != 'PyTorch compiling details':  # longer than all the rest
            print(f'{key}: {value}')
    print(f'Threads: {torch.get_num_threads()}')
