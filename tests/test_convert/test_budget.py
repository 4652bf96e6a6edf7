"""The sizes that a budget chooses, against all that it could choose."""

import itertools

import pytest

from repa_mm.convert.budget import Axis, allocate


def axis(errors, cost, gain=1.0):
    return Axis(range(1, len(errors) + 1), errors, 1, cost, gain)


def test_the_least_error_that_the_budget_allows():
    axes = [
        axis([9, 4, 2, 1, 0], 2.0),
        axis([20, 8, 3, 1, 0], 1.0, 0.3),
        axis([8, 6, 4, 2, 0], 4.0),
    ]
    for budget in range(7, 36):
        sizes = allocate(axes, budget)
        spent = sum(a.cost * s for a, s in zip(axes, sizes))
        assert spent <= budget
        # Convex errors: no other sizes of the same cost are better.
        error = sum(a.gain * a.errors[s - 1] for a, s in zip(axes, sizes))
        for other in itertools.product(range(1, 6), repeat=3):
            if sum(a.cost * s for a, s in zip(axes, other)) <= spent:
                assert error <= sum(a.gain * a.errors[s - 1] for a, s in zip(axes, other)) + 1e-9


def test_bounds():
    axes = [axis([5, 3, 3, 0], 1.0), axis([0, 0, 0, 0], 1.0)]
    assert allocate(axes, 8) == [4, 4]
    assert allocate(axes, 1) == [1, 1]
    assert allocate(axes, 5) == [4, 1]  # the second one loses nothing at any size
    eights = [Axis([4, 8, 12, 16], [3, 2, 1, 0], 4, 1.0, 1.0)]
    assert allocate(eights, 11) == [8]
    sixes = [Axis([4, 6], [1, 0], 4, 1.0, 1.0)]  # the whole need not be a multiple
    assert allocate(sixes, 6) == [6] and allocate(sixes, 5) == [4]
    assert axis([100, 50, 1.9, 0], 1).probe() == pytest.approx(1)
    assert axis([0.0, 0.0], 1).probe() == 1
