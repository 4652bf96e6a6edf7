"""Rows decide alone on what is chosen."""

from dataclasses import replace

import pytest

from repa_mm.search.rows import Candidate, Row, Target, choose, settle, unsure, walk


def row(name, speedup, loss=None, budget=1.0, half=0.5, ends=None):
    """A row that loses `loss` points, give or take `half`."""
    test = {} if loss is None else dict(difference=-loss, interval=[-loss - half, half - loss])
    return Row(
        name, budget=budget, format='f', speedup=speedup, speedup_interval=ends or [speedup] * 2,
        **test,
    )  # fmt: skip


STOCK = row('stock', 1, 0, half=0)
ROWS = [
    STOCK,
    row('slower', 0.9, 0),
    row('exact parts', 1.5, 0, half=0),
    row('60 %', 1.8, 0.2, 0.6),
    row('40 %', 2.2, 0.8, 0.4),
    row('untested', 3, None, 0.4),
    row('25 %', 2.6, 3, 0.25),
]


@pytest.mark.parametrize(
    'max_loss, latency, expected',
    [
        (0, None, 'exact parts'),
        (0.69, None, 'exact parts'),  # the whole interval counts
        (0.7, None, '60 %'),
        (99, None, '25 %'),  # without a test, nothing is known of the loss
        (None, 0.99, 'exact parts'),
        (None, 0.5, 'untested'),
        (None, 0.34, 'untested'),
        (None, 0.3, None),
        (0.7, 0.6, '60 %'),
        (0.7, 0.5, None),
    ],
)
def test_the_choice(max_loss, latency, expected):
    found = choose(ROWS, Target(max_loss, latency))
    assert (found and found.candidate) == expected
    assert choose(ROWS[:2], Target(99, latency)) is choose(ROWS[:2], Target(None, 0.99)) is None


def test_a_latency_without_tests_keeps_what_it_can():
    """The widest model that is fast enough, in its fastest format."""
    rows = [STOCK, *(row(f'{b}', s, budget=b) for b, s in ((1, 1.5), (1, 2), (1, 2.1), (0.4, 3)))]
    assert choose(rows, Target(latency=0.5)) is rows[3]
    assert choose(rows, Target(latency=0.4)) is rows[4]


def test_the_row_that_too_few_images_leave_open_is_named():
    chosen = choose(ROWS, Target(0.8))
    assert chosen.candidate == '60 %'
    (line,) = unsure(ROWS, chosen, Target(0.8))
    assert 'too few to tell whether 40 % (f) loses more than 0.8 points' in line
    assert not unsure(ROWS, choose(ROWS, Target(2)), Target(2))
    assert not unsure(ROWS, None, Target(0.8, 0.3)) and not unsure(ROWS, None, Target())
    rows = [STOCK, row('sure', 3, 0.6, half=0.1), row('slower, but better', 2, 0.2, half=0.9)]
    assert 'whether slower, but better (f)' in unsure(rows, rows[1], Target(0.8, 0.9))[0]


WIDE = ['base', '60 %', '40 %']
NARROW_FIRST = '15 %', '25 %', '40 %', '60 %', 'base'


@pytest.mark.parametrize(
    'max_loss, latency, seen, int8',
    [
        (None, None, [*WIDE, '25 %', '15 %'], NARROW_FIRST),
        (None, 0.6, [*WIDE, '25 %', '15 %'], NARROW_FIRST),
        # 40 % lose 6 points; int8 loses 2 more.
        (5, None, WIDE, ['60 %', 'base']),
        (6.5, None, [*WIDE, '25 %'], ['40 %', '60 %']),
        (5, 0.6, WIDE, ['60 %', 'base']),
    ],
)
def test_the_walk_ends_where_a_floor_does(max_loss, latency, seen, int8):
    budgets = dict(zip(NARROW_FIRST[::-1], (1, 0.6, 0.4, 0.25, 0.15)))
    asked = []

    def rows_of(candidate, is_int8):
        asked.append((candidate.candidate, is_int8))
        loss = 10 * (1 - candidate.budget) + 2 * is_int8
        return [row(candidate.candidate, 1, loss, half=0)]

    given = (Candidate(name, budget=budget) for name, budget in budgets.items())
    rows = walk(given, rows_of, Target(max_loss, latency))
    assert asked == [*((name, False) for name in seen), *((name, True) for name in int8)]
    order = [row.candidate for row in rows]
    assert order == sorted(order, key=[*budgets].index) and len(rows) == len(asked)


def test_a_failure_is_not_a_loss():
    """All formats of one budget raise, and one of another."""
    of = {'60 %': [], '40 %': [row('40 %', 2, 1, 0.4)], '25 %': [row('25 %', 2.5, 9, 0.25)]}
    given, asked = (Candidate(x, budget=int(x[:2]) / 100) for x in (*of, '15 %')), []

    def rows_of(candidate, is_int8):
        asked.append(candidate.candidate)
        return [] if is_int8 else of[asked[-1]]

    assert walk(given, rows_of, Target(2)) == of['40 %'] + of['25 %']
    assert asked == ['60 %', '40 %', '25 %', '40 %', '60 %']


@pytest.mark.parametrize(
    'max_loss, latency, expected, rounds',
    [
        # What seems to be the fastest falls, what seems slower is the fastest.
        (0, None, 'b', ['a b', 'b c']),
        (9, None, 'narrow', ['narrow']),  # which nothing reaches
        # It loses more, and is what is left.
        (None, 0.5, 'narrow', ['a narrow', 'b narrow', 'c narrow']),
        (None, 0.9, 'b', ['a b', 'b c']),
        (0, 0.4, None, ['a b']),  # of which nothing takes so little time
        (0, 0.2, None, []),
    ],
)
def test_rivals_are_timed_in_pairs(max_loss, latency, expected, rounds):
    rows = [
        STOCK,
        row('a', 4.01, 0, half=0, ends=[1.65, 4.47]),
        row('b', 1.6, 0, half=0, ends=[1.2, 2.6]),
        row('c', 1.8, 0, half=0, ends=[1.75, 2.1]),
        row('slow', 1.5, 0, half=0, ends=[1.5, 1.6]),
        row('narrow', 5, 3, budget=0.4, half=0, ends=[4.9, 5.1]),
    ]
    true, seen = dict(a=1.7, b=1.9, c=1.8, slow=9, narrow=5), []

    def time_again(pair):
        seen.append(' '.join(sorted(row.candidate for row in pair)))
        fast = ((row, true[row.candidate]) for row in pair)
        return [replace(row, speedup=x, speedup_interval=[x, x]) for row, x in fast]

    again, chosen = settle(rows, time_again, Target(max_loss, latency))
    assert ((chosen and chosen.candidate), seen) == (expected, rounds)
    assert [row.name for row in again] == [row.name for row in rows] and chosen in [None, *again]
    timed = {name for names in seen for name in names.split()}
    assert all((row.speedup == true[row.candidate]) for row in again if row.candidate in timed)
