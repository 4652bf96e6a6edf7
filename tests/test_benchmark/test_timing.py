"""The timer, on a clock that only moves when it is told to."""

import mmap
import os
import signal

import numpy as np
import pytest

from repa_mm.benchmark.progress import Progress
from repa_mm.benchmark.timing import (
    Recorder,
    compare,
    interruptible,
    measure,
    order_of_turn,
    statistics,
    summarize,
)


class FakeClock:
    """Seconds pass in :meth:`sleep`; a device also has work in flight."""

    def __init__(self):
        self.seconds = 0.0
        self.pending = 0.0

    def now(self):
        return self.seconds

    def mark(self):
        return self.seconds + self.pending

    def between(self, start, end):
        return end - start

    def synchronize(self):
        self.seconds += self.pending
        self.pending = 0.0

    def sleep(self, seconds):
        self.seconds += seconds

    def launch(self, seconds):
        self.pending += seconds


def test_sections_are_exclusive_and_sum_to_the_total():
    clock = FakeClock()
    recorder = Recorder(clock, rest='other')

    def call(x):
        clock.sleep(1)
        with recorder.section('outer'):
            clock.sleep(2)
            with recorder.section('inner'):
                clock.sleep(4)
            clock.sleep(8)
        recorder.section('inner')(clock.sleep)(16)
        return x + 1

    result, total, parts = recorder.run(call, 1)
    assert result == 2
    assert parts == dict(outer=10.0, inner=20.0, other=1.0)
    assert total == sum(parts.values()) == 31


def test_work_of_a_device_counts_where_it_was_launched():
    clock = FakeClock()
    recorder = Recorder(clock)
    clock.launch(100)  # of an earlier call

    def call():
        with recorder.section('a'):
            clock.launch(3)
        with recorder.section('b'):
            clock.launch(5)

    _, total, parts = recorder.run(call)
    assert (total, parts) == (8, dict(a=3.0, b=5.0, rest=0.0))


def test_sections_outside_of_calls_do_not_count():
    clock = FakeClock()
    recorder = Recorder(clock)
    with recorder.section('a'):
        clock.sleep(1)
    assert recorder.run(clock.sleep, 2)[1:] == (2, dict(rest=2.0))


def test_an_error_leaves_the_recorder_usable():
    clock = FakeClock()
    recorder = Recorder(clock)

    def fail():
        with recorder.section('a'):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        recorder.run(fail)
    assert recorder.run(clock.sleep, 1)[1:] == (1, dict(rest=1.0))


def test_callables_take_turns_on_copies_of_the_same_input():
    clock = FakeClock()
    seen = []

    def call(name, seconds):

        def run(batch):
            seen.append((name, batch[0]))
            batch[0] = 'changed'
            clock.sleep(seconds)

        return run

    def load(index):
        clock.sleep(0.5)
        return [index]

    turns = []
    times = measure(
        dict(a=call('a', 1), b=call('b', 2), c=call('c', 3)),
        load,
        4,
        2,
        Recorder(clock),
        lambda turn, times: turns.append((turn, len(times))),
    )
    inputs = [index for _, index in seen]
    # Two of the warm-up, then all from the first one on.
    assert inputs == [0] * 3 + [1] * 3 + [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert {n: r['total'] for n, r in times.raw.items()} == dict(
        a=[1000] * 4, b=[2000] * 4, c=[3000] * 4
    )
    assert times.data == [500] * 4 and not times.interrupted
    assert turns == [(-2, 0), (-1, 0), (0, 1), (1, 2), (2, 3), (3, 4)]
    # Nobody always runs first.
    first = {seen[i][0] for i in range(6, 18, 3)}
    assert len(first) > 1


def test_order_is_fair():
    names = ['a', 'b', 'c']
    orders = [order_of_turn(names, turn) for turn in range(6)]
    assert all(sorted(order) == names for order in orders)
    for position in range(3):
        assert sorted(o[position] for o in orders) == sorted(names * 2)


def test_parts_that_are_missing_in_some_calls():
    clock = FakeClock()
    recorder = Recorder(clock)

    def call(index):
        clock.sleep(1)
        if index == 1:
            with recorder.section('rare'):
                clock.sleep(2)

    times = measure(dict(a=call), lambda i: i, 3, 0, recorder)
    samples = times.raw['a']
    assert (samples['rest'], samples['rare']) == ([1000] * 3, [0, 2000, 0])
    found = statistics(times.raw, 'a')['a']
    assert found['parts']['rest']['mean'] + found['parts']['rare']['mean'] == pytest.approx(
        found['latency']['mean']
    )


@pytest.mark.parametrize(
    'interrupt',
    [lambda: os.kill(os.getpid(), signal.SIGINT), lambda: os.kill(os.getpid(), signal.SIGTERM)],
)
def test_interrupted_measurements_keep_complete_rows(interrupt):
    clock = FakeClock()
    calls = []

    def first(index):
        clock.sleep(1)

    def second(index):
        calls.append(index)
        if len(calls) == 3:
            interrupt()
            clock.sleep(1)  # gives the handler a chance to run
        clock.sleep(1)

    before = signal.getsignal(signal.SIGTERM)
    with interruptible():
        times = measure(dict(a=first, b=second), lambda i: i, 10, 0, Recorder(clock))
    assert times.interrupted
    assert [times.raw[name]['total'] for name in 'ab'] == [[1000] * 2] * 2 and len(times) == 2
    assert signal.getsignal(signal.SIGTERM) == before


def test_interrupted_with_nothing_to_report(capsys):
    with pytest.raises(SystemExit) as error, interruptible():
        raise KeyboardInterrupt
    assert error.value.code == 130
    assert 'before anything was measured' in capsys.readouterr().err


def test_summary_agrees_with_numpy():
    values = np.random.default_rng(0).lognormal(size=101)
    summary = summarize(values)
    assert summary['count'] == 101
    for key, expected in dict(
        median=np.median(values),
        mean=values.mean(),
        std=values.std(),
        min=values.min(),
        max=values.max(),
        p90=np.quantile(values, 0.9),
        p99=np.quantile(values, 0.99),
    ).items():
        assert summary[key] == pytest.approx(expected)


def test_ratio_and_its_interval():
    generator = np.random.default_rng(1)
    reference = generator.lognormal(0, 0.1, 200)
    noise = generator.lognormal(0, 0.02, 200)
    result = compare(0.7 * reference * noise, reference)
    assert result['ratio'] == np.median(0.7 * reference * noise) / np.median(reference)
    assert 0.66 < result['low'] < 0.7 < result['high'] < 0.74
    # Paired: the same image is slow for both, which cancels out.
    assert compare(2 * reference, reference)['low'] == pytest.approx(2)
    assert compare(2 * reference, reference)['high'] == pytest.approx(2)
    few = compare([1.0, 2.0], [2.0, 4.0])
    assert few['ratio'] == 0.5 and few['low'] is few['high'] is None
    with pytest.raises(ValueError, match='not pairs'):
        compare([1.0], [1.0, 2.0])


def test_ratio_of_each_run():
    values, reference = [1.0, 1.0, 3.0, 9.0, 3.0], [2.0, 2.0, 4.0, 4.0, 4.0]
    assert compare(values, reference, [0, 0, 1, 1, 1])['runs'] == [0.5, 0.75]
    assert compare(values, reference)['runs'] == [0.75]


def test_pages_that_the_system_gives():
    def touch(size):
        # malloc may have memory left from other tests; a mapping of its own is always new.
        with mmap.mmap(-1, size) as memory:
            memory[::4096] = bytes(size // 4096)

    times = measure(dict(touch=touch), lambda i: 2**25, 3)
    assert min(times.raw['touch']['page faults']) >= 16  # 32 MiB, in pages of at most 2 MiB


def test_interval_covers_the_true_ratio():
    """About 95 of 100 intervals should; fewer than 85 would be a bug."""
    generator = np.random.default_rng(2)
    covered = 0
    for _ in range(100):
        a, b = generator.lognormal(0, 0.2, (2, 40))
        result = compare(0.8 * a, b, resamples=300)
        covered += result['low'] <= 0.8 <= result['high']
    assert covered >= 85


def test_progress_on_a_pipe_is_short(capsys):
    clock = FakeClock()
    with Progress(100, 2, 'size 9x9') as progress:
        measure(dict(a=lambda i: clock.sleep(0.25)), lambda i: i, 100, 2, Recorder(clock), progress)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 + 10
    assert lines[0] == 'size 9x9: warm-up 1/2'
    assert '100/100 images' in lines[-1] and 'a 250 ms' in lines[-1]
