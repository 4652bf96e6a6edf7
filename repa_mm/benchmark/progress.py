"""A line on the terminal about a running measurement."""

import sys

import numpy as np
import rich.progress
from rich.console import Console

from repa_mm.benchmark.timing import Times


class Progress:
    """A context manager that shows how many inputs of ``repeats``, or of ``warmup``, are done.

    A terminal gets a bar that moves, a file or a pipe ten lines. ``unit`` is what an input is.
    """

    def __init__(
        self, repeats: int, warmup: int, title: str = '', unit: str = 'images', quiet: bool = False
    ) -> None:
        self.repeats, self.warmup, self.unit = repeats, warmup, unit
        self.title = f'{title}: ' if title else ''
        self.quiet = quiet
        console = Console(file=sys.stderr, markup=False)
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn('{task.description}', markup=False),
            rich.progress.BarColumn(20),
            rich.progress.TimeRemainingColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task('', total=repeats)

    def __enter__(self) -> 'Progress':
        self._bar.start()
        return self

    def __exit__(self, *error) -> None:
        self._bar.stop()

    def say(self, text: str, done: int = 0) -> None:
        """Show a text, and the bar with so many inputs done."""
        self._bar.update(self._task, description=f'{self.title}{text}', completed=done)
        if self._bar.disable and not self.quiet:
            print(f'{self.title}{text}', file=sys.stderr, flush=True)

    def __call__(self, turn: int, times: Times) -> None:
        """Show what :func:`~repa_mm.benchmark.timing.measure` has measured."""
        if turn < 0:
            self.say(f'warm-up {turn + self.warmup + 1}/{self.warmup}')
            return
        done = turn + 1
        if self._bar.disable and done * 10 // self.repeats == turn * 10 // self.repeats:
            return
        medians = ', '.join(
            f'{name} {np.median(samples["total"]):.4g} ms'
            for name, samples in list(times.raw.items())[:4]
        )
        self.say(f'{done}/{self.repeats} {self.unit}; {medians}', done)
