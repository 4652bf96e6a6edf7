import gc
import time

import numpy as np
import pytest

from repa_mm.measure.timing import change, compare, measure, order_of_turn, show


def test_every_callable_runs_first_and_after_every_other_one():
    orders = [order_of_turn('abc', turn) for turn in range(6)]
    assert {order[0] for order in orders} == set('abc')
    assert {tuple(order[:2]) for order in orders} >= {('a', 'b'), ('b', 'a'), ('c', 'b')}
    assert all(sorted(order) == ['a', 'b', 'c'] for order in orders)


def test_measure():
    seen = []

    def call(argument):
        if not gc.isenabled():  # a measured call
            seen.append(list(argument))
        argument.append(1)  # of a copy
        time.sleep(0.01)

    times = measure({'a': call, 'b': lambda _: None}, [0], repeats=3)
    assert seen == [[0]] * 4 and gc.isenabled()
    assert {name: len(values) for name, values in times.items()} == dict(a=3, b=3)
    assert times['a'].min() >= 10 > 5 > np.median(times['b'])


def test_each_turn_has_an_argument_of_its_own():
    """Before a measured call, a callable sees the arguments of earlier turns alone."""
    seen = []
    times = measure({'a': seen.append}, [[0], [1], [2]], 4, settle=0.001, per_turn=True)
    assert len(times['a']) == 4
    seen = [x for (x,) in seen]
    first = [i for i, x in enumerate(seen) if x not in seen[:i]]
    assert [seen[i] for i in first] == [2, 0, 1]  # turn -1 is the warm-up
    assert seen[-1] == 0  # begins again
    assert set(seen[first[1] + 1 : first[2]]) == {0}  # settles with what it has seen


def test_short_calls_run_unmeasured_first_and_long_ones_do_not():
    count = dict(short=0, long=0)

    def call(name, seconds):
        count[name] += 1
        time.sleep(seconds)
        return seconds

    calls = dict(short=lambda _: call('short', 0.01), long=lambda _: call('long', 0.11))
    noted = []
    measure(calls, None, repeats=3, note=lambda *found: noted.append(found))
    assert count['long'] == 4 and count['short'] > 2 * 3 + 4
    assert sorted(noted) == [('long', 0.11)] * 3 + [('short', 0.01)] * 3  # of measured calls


def test_no_turn_begins_after_the_time():
    times = measure({'a': lambda _: time.sleep(0.11)}, None, 50, seconds=0.1)
    assert len(times['a']) == 3


def test_an_error_leaves_garbage_collection_on():
    with pytest.raises(ZeroDivisionError):
        measure({'a': lambda _: 1 / 0}, None, 1)
    assert gc.isenabled()


def test_compare():
    """What disturbs both of a pair alike cancels out of neither median, but of the interval."""
    rng = np.random.default_rng(0)
    reference = rng.normal(100, 1, 200)
    ratio, low, high = compare(0.7 * reference * rng.normal(1, 0.01, 200), reference)
    assert low < ratio < high
    assert ratio == pytest.approx(0.7, abs=0.005)
    assert high - low < 0.01
    assert compare(reference, reference) == (1, 1, 1)


def test_a_table_of_changes(capsys):
    show('title', ('a', 'b'), [['x', change(np.full(3, 60.0), np.full(3, 100.0))]])
    assert '| x | -40.0 % [-40.0, -40.0] |' in capsys.readouterr().out
    show('title', ('a', 'b'), [['x' * 250, '12.5']])  # the path of a file, say
    assert f'| {"x" * 250} | 12.5 |' in capsys.readouterr().out
