"""The timer: several callables in turn, in one process, and statistics of their times."""

import copy
import gc
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

try:
    import resource
except ImportError:  # Windows
    resource = None

# Fewer samples than these say nothing about an interval.
MIN_SAMPLES = 5
CONFIDENCE = 0.95


class Clock:
    """Wall-clock time of a device.

    On a GPU, :meth:`mark` records an event instead of waiting, so that the split into sections
    does not disturb what is timed.

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
        self._stack: list[str] = []
        self._marks: list = []

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Count what happens inside as ``name``; outside of :meth:`run`, count nothing.

        A context manager, or a decorator of a function.
        """
        if not self._stack:
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

    def run(self, function: Callable, *args) -> tuple:
        """Call a function once, without garbage collection.

        Returns:
            tuple: What the function returns; its time in seconds; and the time of every section in
            it, a dict whose values sum to that time.
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
    """What :func:`measure` measured, input by input.

    Attributes:
        raw (dict): For each callable its samples, (n,) each: its time and that of each section in
            milliseconds, under 'total' and the section's name; and under 'page faults' the pages
            that the system gave to the process meanwhile.
        data (list): The milliseconds that each input took to load, (n,).
        interrupted (bool): Whether the measurement stopped before its last input.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.raw: dict[str, dict[str, list[float]]] = {name: {} for name in names}
        self.data: list[float] = []
        self.interrupted = False

    def __len__(self) -> int:
        return len(self.data)

    def add(self, loaded: float, row: dict[str, dict[str, float]]) -> None:
        """Append one input: milliseconds to load it, and one sample of all that ``raw`` has."""
        for name, new in row.items():
            samples = self.raw[name]
            for key in {**samples, **new}:  # a section may be missing in some calls
                samples.setdefault(key, [0.0] * len(self)).append(new.get(key, 0.0))
        self.data.append(loaded)


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

    Whatever else the machine does in the meantime meets all callables alike. Ctrl-C (or SIGTERM,
    inside :func:`interruptible`) ends the measurement early; what was measured until then is
    returned.

    Args:
        calls (dict): Callables of one argument, by name.
        load (Callable): Gives the i-th input. Each callable gets a copy.
        repeats (int): Number of inputs to measure.
        warmup (int): Number of inputs to run before that, without measuring: the first ones.
        recorder (Recorder, optional): With sections around parts of the callables, for the split.
        progress (Callable, optional): Called after every input with its index (negative while
            warming up) and the times so far.
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
                faults = page_faults()
                _, total, parts = recorder.run(calls[name], argument)
                faults = page_faults() - faults
                parts = {part: 1e3 * seconds for part, seconds in parts.items()}
                row[name] = {'total': 1e3 * total, 'page faults': faults, **parts}
            if turn >= 0:
                times.add(1e3 * loaded, row)
            if progress:
                progress(turn, times)
    except KeyboardInterrupt:
        times.interrupted = True
    return times


def page_faults() -> int:
    """Pages that the system has given to this process so far, where it says so."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource else 0


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM end a measurement as Ctrl-C does.

    Where there is nothing yet to report, the program ends with a line.
    """

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
        dict: ``count``, ``median``, ``mean``, ``std``, ``min``, ``max``, ``p90`` and ``p99``.
    """
    values = np.asarray(values, float)
    median, p90, p99 = map(float, np.percentile(values, [50, 90, 99]))
    others = {name: float(getattr(values, name)()) for name in ('mean', 'std', 'min', 'max')}
    return dict(count=len(values), median=median, **others, p90=p90, p99=p99)


def compare(
    values: Sequence[float],
    reference: Sequence[float],
    runs: Sequence[int] | None = None,
    resamples: int = 2000,
) -> dict[str, Any]:
    """The ratio of two medians, with confidence intervals.

    The interval over inputs is that of a percentile bootstrap over *pairs*: the i-th samples of
    both belong to the same input, measured one after the other. It says nothing about what another
    process would find. For that, ``runs`` gives the ratio of each process: the range of N of them
    holds the median of all processes with probability 1 - 2^(1-N), whatever their distribution.

    Args:
        values (Sequence[float]): Samples, (n,).
        reference (Sequence[float]): Samples to divide by, (n,).
        runs (Sequence[int], optional): The process that each pair was measured in, (n,).
        resamples (int): Of the bootstrap. Defaults to 2000.

    Returns:
        dict: ``ratio``, ``low``, ``high`` (None with fewer than 5 samples), ``confidence``, and
        ``runs``: the ratio of each process.

    Raises:
        ValueError: If the samples are not pairs.
    """
    values, reference = np.asarray(values, float), np.asarray(reference, float)
    if values.shape != reference.shape or not len(values):
        raise ValueError(
            f'the samples are not pairs: there are {len(values)} and {len(reference)} of them'
        )
    runs = np.zeros(len(values), int) if runs is None else np.asarray(runs)

    def ratio(chosen) -> np.ndarray:
        return np.median(values[chosen], -1) / np.median(reference[chosen], -1)

    low = high = None
    if len(values) >= MIN_SAMPLES:
        chosen = np.random.default_rng(0).integers(0, len(values), (resamples, len(values)))
        tail = 50 * (1 - CONFIDENCE)
        low, high = map(float, np.percentile(ratio(chosen), [tail, 100 - tail]))
    by_run = [float(ratio(runs == run)) for run in np.unique(runs)]
    whole = float(ratio(slice(None)))
    return dict(ratio=whole, low=low, high=high, confidence=CONFIDENCE, runs=by_run)


def statistics(
    raw: dict[str, dict[str, list[float]]], reference: str, runs: Sequence[int] | None = None
) -> dict[str, dict[str, Any]]:
    """Statistics of all callables.

    Args:
        raw (dict): The samples of each callable, as :class:`Times` has them.
        reference (str): The callable to compare with.
        runs (Sequence[int], optional): As for :func:`compare`.

    Returns:
        dict: For each callable ``latency`` and ``page_faults`` (:func:`summarize`), ``parts`` (the
        same of each section; their means sum to the mean latency), ``ratio`` (:func:`compare`) and
        ``raw``.
    """
    result = {}
    for name, samples in raw.items():
        parts = {key: summarize(values) for key, values in samples.items()}
        total, pages = parts.pop('total'), parts.pop('page faults')
        ratio = compare(samples['total'], raw[reference]['total'], runs)
        result[name] = dict(latency=total, page_faults=pages, parts=parts, ratio=ratio, raw=samples)
    return result
