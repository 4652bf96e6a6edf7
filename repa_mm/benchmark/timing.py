"""The timer: several callables in turn, in one run, and statistics of it."""

import copy
import gc
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

# Fewer samples than these say nothing about an interval.
MIN_SAMPLES = 5


class Clock:
    """Wall-clock time of a device.

    On a GPU, :meth:`mark` records an event instead of waiting, so that the
    split into sections does not disturb what is timed.

    Args:
        device (str | torch.device): Defaults to 'cpu'.
    """

    def __init__(self, device='cpu') -> None:
        self.device = torch.device(device)
        self.cuda = self.device.type == 'cuda'

    def synchronize(self) -> None:
        """Wait for the device to finish."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
        elif self.device.type != 'cpu':
            getattr(torch, self.device.type).synchronize()

    def now(self) -> float:
        """Seconds of this machine's clock."""
        return time.perf_counter()

    def mark(self) -> Any:
        """This point in the device's work."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            return event
        self.synchronize()
        return self.now()

    def between(self, start: Any, end: Any) -> float:
        """Seconds between two marks, after :meth:`synchronize`."""
        return start.elapsed_time(end) / 1e3 if self.cuda else end - start


class Recorder:
    """Times calls, split into named sections that sum to the whole.

    A section inside another one interrupts it, so each moment counts once.

    Args:
        clock (Clock, optional): Defaults to that of the CPU.
        rest (str): Name of the time in no section. Defaults to 'rest'.
    """

    def __init__(self, clock: Clock | None = None, rest: str = 'rest') -> None:
        self.clock = clock or Clock()
        self.rest = rest
        self.paused = False
        self._stack: list[str] = []
        self._marks: list = []

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Count what happens inside as ``name``; nothing, outside of calls."""
        if self.paused or not self._stack:
            yield
            return
        self._enter(name)
        try:
            yield
        finally:
            self._stack.pop()
            self._marks.append((self._stack[-1], self.clock.mark()))

    def _enter(self, name: str) -> None:
        self._stack.append(name)
        self._marks.append((name, self.clock.mark()))

    def wrap(self, function: Callable, name: str) -> Callable:
        """``function``, whose calls count as the section ``name``."""

        def timed(*args, **kwargs):
            with self.section(name):
                return function(*args, **kwargs)

        return timed

    def run(self, function: Callable, *args) -> tuple:
        """Call a function once.

        Returns:
            tuple: What it returns; its time in seconds; and the time of every
            section in it, a dict whose values sum to that time.
        """
        clock = self.clock
        collecting = gc.isenabled()
        clock.synchronize()
        gc.disable()
        self._marks = []
        begin = clock.now()
        self._enter(self.rest)
        try:
            result = function(*args)
        finally:
            self._stack.clear()
            if collecting:
                gc.enable()
        self._marks.append((None, clock.mark()))
        clock.synchronize()
        total = clock.now() - begin
        parts: dict[str, float] = {}
        for (name, start), (_, end) in zip(self._marks, self._marks[1:]):
            if name != self.rest:
                parts[name] = parts.get(name, 0.0) + clock.between(start, end)
        parts[self.rest] = total - sum(parts.values())
        return result, total, parts


class Times:
    """What :func:`measure` measured, in seconds.

    Attributes:
        totals (dict): For each callable the times of its calls, (n,). The
            i-th of all callables belong to the same input.
        parts (dict): For each callable, for each section, its times, (n,).
        data (list): The time that each input took to load, (n,).
        interrupted (bool): Whether it stopped before all inputs were measured.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.totals: dict[str, list[float]] = {name: [] for name in names}
        self.parts: dict[str, dict[str, list[float]]] = {n: {} for n in names}
        self.data: list[float] = []
        self.interrupted = False

    def __len__(self) -> int:
        return len(self.data)

    def add(self, data: float, row: dict[str, tuple]) -> None:
        """Append one input's times: (total, parts) of every callable."""
        before = len(self)
        for name, (total, parts) in row.items():
            self.totals[name].append(total)
            columns = self.parts[name]
            for part in {**columns, **parts}:
                column = columns.setdefault(part, [0.0] * before)
                column.append(parts.get(part, 0.0))
        self.data.append(data)


def order_of_turn(names: Sequence[str], turn: int) -> list[str]:
    """The order in which callables run: rotated, and reversed every other time.

    So none always runs first, or always after the same other one.
    """
    names = list(names)
    shift = turn // 2 % len(names)
    names = names[shift:] + names[:shift]
    return names[::-1] if turn % 2 else names


def measure(
    calls: dict[str, Callable],
    load: Callable[[int], Any],
    repeats: int,
    warmup: int = 0,
    recorder: Recorder | None = None,
    progress: Callable[[int, Times], None] | None = None,
) -> Times:
    """Time callables on the same inputs, in turn, input by input.

    Whatever else the machine does in the meantime meets all of them alike.
    Ctrl-C (or SIGTERM, inside :func:`interruptible`) ends it early; what was
    measured until then is returned.

    Args:
        calls (dict): Callables of one argument, by name.
        load (Callable): Gives the i-th input. Each callable gets a copy.
        repeats (int): Number of inputs to measure.
        warmup (int): Number of inputs to run before that, without measuring:
            the first ones. Defaults to 0.
        recorder (Recorder, optional): With sections around parts of the
            callables, for the split. Defaults to a plain one.
        progress (Callable, optional): Called after every input with its index
            (negative while warming up) and the times so far.
    """
    recorder = recorder or Recorder()
    times = Times(list(calls))
    try:
        for turn in range(-warmup, repeats):
            begin = recorder.clock.now()
            data = load(turn + warmup if turn < 0 else turn)
            loaded = recorder.clock.now() - begin
            row = {}
            for name in order_of_turn(list(calls), turn):
                argument = copy.deepcopy(data)
                row[name] = recorder.run(calls[name], argument)[1:]
            if turn >= 0:
                times.add(loaded, row)
            if progress:
                progress(turn, times)
    except KeyboardInterrupt:
        times.interrupted = True
    return times


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM end a measurement as Ctrl-C does.

    Where there is nothing yet to report, the program ends with a line.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        print('\ninterrupted before anything was measured', file=sys.stderr)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)


def summarize(values: Sequence[float]) -> dict[str, Any]:
    """Statistics of samples; percentiles interpolate as numpy's do.

    Returns:
        dict: ``count``, and if there are samples ``median``, ``mean``,
        ``std``, ``min``, ``max``, ``p90``, ``p99``.
    """
    values = np.asarray(values, float)
    if not len(values):
        return dict(count=0)
    median, p90, p99 = np.percentile(values, [50, 90, 99])
    return dict(
        count=len(values),
        median=float(median),
        mean=float(values.mean()),
        std=float(values.std()),
        min=float(values.min()),
        max=float(values.max()),
        p90=float(p90),
        p99=float(p99),
    )


def compare(
    values: Sequence[float],
    reference: Sequence[float],
    confidence: float = 0.95,
    resamples: int = 2000,
) -> dict[str, Any]:
    """The ratio of two medians, with a confidence interval.

    The interval is that of a percentile bootstrap over *pairs*: the i-th
    samples of both belong to the same input, measured one after the other.

    Args:
        values (Sequence[float]): Samples, (n,).
        reference (Sequence[float]): Samples to divide by, (n,).
        confidence (float): Of the interval. Defaults to 0.95.
        resamples (int): Of the bootstrap. Defaults to 2000.

    Returns:
        dict: ``ratio``, ``low``, ``high`` (None with fewer than 5 samples)
        and ``confidence``.

    Raises:
        ValueError: If the samples are not pairs.
    """
    values, reference = np.asarray(values, float), np.asarray(reference, float)
    if values.shape != reference.shape or not len(values):
        raise ValueError(
            f'the samples are not pairs: there are {len(values)} and {len(reference)} of them'
        )
    result = dict(
        ratio=float(np.median(values) / np.median(reference)),
        low=None,
        high=None,
        confidence=confidence,
    )
    if len(values) >= MIN_SAMPLES:
        generator = np.random.default_rng(0)
        ratios = np.empty(resamples)
        for i in range(resamples):
            chosen = generator.integers(0, len(values), len(values))
            ratios[i] = np.median(values[chosen]) / np.median(reference[chosen])
        tail = 50 * (1 - confidence)
        result['low'], result['high'] = map(float, np.percentile(ratios, [tail, 100 - tail]))
    return result


class Progress:
    """A line on the terminal about a running measurement.

    Args:
        repeats (int): Number of inputs that will be measured.
        warmup (int): Number of inputs before those.
        title (str): What is measured. Defaults to none.
        unit (str): What an input is. Defaults to 'images'.
        show (Sequence[str], optional): Callables to show the median of.
            Defaults to all.
    """

    def __init__(
        self,
        repeats: int,
        warmup: int,
        title: str = '',
        unit: str = 'images',
        show: Sequence[str] | None = None,
    ) -> None:
        self.repeats, self.warmup = repeats, warmup
        self.title = f'{title}: ' if title else ''
        self.unit, self.show = unit, show
        self.start = None
        self.width = 0
        self.terminal = sys.stderr.isatty()

    def say(self, text: str) -> None:
        """Show what happens before the measurement."""
        self._show(f'{self.title}{text}')

    def __call__(self, turn: int, times: Times) -> None:
        if turn < 0:
            self._show(f'{self.title}warm-up {turn + self.warmup + 1}/{self.warmup}')
            self.start = time.perf_counter()
            return
        if self.start is None:
            self.start = time.perf_counter()
        done = turn + 1
        left = (time.perf_counter() - self.start) / done * (self.repeats - done)
        medians = ', '.join(
            f'{name} {1e3 * np.median(values):.4g} ms'
            for name, values in times.totals.items()
            if self.show is None or name in self.show
        )
        filled = 20 * done // self.repeats
        text = (
            f'{self.title}[{"#" * filled}{"." * (20 - filled)}] '
            f'{done}/{self.repeats} {self.unit}, {left:.0f} s left; '
            f'{medians}'
        )
        # A file or a pipe gets ten lines instead of an animation.
        if self.terminal or done * 10 // self.repeats != (done - 1) * 10 // self.repeats:
            self._show(text)

    def _show(self, text: str) -> None:
        if self.terminal:
            import shutil

            text = text[: shutil.get_terminal_size().columns - 1]
            print(f'\r{text.ljust(self.width)}', end='', file=sys.stderr, flush=True)
            self.width = len(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the line."""
        if self.terminal and self.width:
            print(file=sys.stderr)
