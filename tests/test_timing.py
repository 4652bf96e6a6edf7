import gc
import time

import numpy as np
import pytest

from repa_mm.benchmark.tables import latency_rows, ratios, share_rows, show
from repa_mm.benchmark.timing import compare, measure, order_of_turn


def test_every_callable_runs_first_and_after_every_other_one():
    orders = [order_of_turn('abc', turn) for turn in range(6)]
    assert {order[0] for order in orders} == set('abc')
    assert {tuple(order[:2]) for order in orders} >= {('a', 'b'), ('b', 'a'), ('c', 'b')}
    assert all(sorted(order) == ['a', 'b', 'c'] for order in orders)


def test_measure():
    seen = []

    def call(argument):
        assert not gc.isenabled()
        seen.append(list(argument))
        argument.append(1)  # of a copy
        time.sleep(0.01)

    times = measure({'a': call, 'b': lambda _: None}, [0], repeats=3, warmup=2)
    assert seen == [[0]] * 5 and gc.isenabled()
    assert {name: len(values) for name, values in times.items()} == dict(a=3, b=3)
    assert times['a'].min() >= 10 > 5 > np.median(times['b'])


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


def test_rows(capsys):
    times = {
        'vanilla': np.full(3, 100.0),
        'vanilla, our attention': np.full(3, 80.0),
        'deploy': np.full(3, 60.0),
    }
    rows = latency_rows(times, batch_size=2)
    assert rows[0] == ['vanilla', '100.0', '20.00', '', '']
    assert rows[2][3:] == ['-40.0 % [-40.0, -40.0]', '-25.0 % [-25.0, -25.0]']
    assert latency_rows({'deploy': times['deploy']}, 1)[0][3:] == ['', '']
    spent = {name: {'FFNs': values / 4} for name, values in times.items()}
    assert share_rows(times, spent)[4:] == [
        ['deploy, all', '60.0', '100.0%'],
        ['deploy, FFNs', '15.0', '25.0%'],
    ]
    assert ratios(times)['deploy'] == '0.60'
    show('title', ('a', 'b'), [['x', 'y']])
    assert '| x | y |' in capsys.readouterr().out
