"""Steps say how many there are, how long they took, and about how long the others take."""

from collections import Counter

import pytest

from repa_mm.search import steps


@pytest.fixture
def run(monkeypatch):
    """A function: a step that takes some seconds, and says how far it is after each ten."""
    now, made = [0.0], steps.Steps()
    monkeypatch.setattr(steps.time, 'monotonic', lambda: now[0])
    made.left = Counter(fit=2, test=3)

    def run(what, seconds, error=None):
        def do():
            print('noise of the hosts')
            for i in range(0, seconds, 10):
                now[0] += min(10, seconds - i)
                made.tell(f'{i} of {seconds}')
            if error:
                raise error
            return what

        return made.run(what, do)

    return run


def test_steps(run, capsys):
    assert run('test a', 3) == 'test a'
    run('fit b', 100)
    with pytest.raises(ValueError):
        run('test c', 0, ValueError())
    run('test d', 33)
    run('time e', 1)  # which was not planned
    assert capsys.readouterr().out.splitlines() == [
        '1/5 test a: 3 s, more than 6 s left',
        '2/5 fit b',
        '    60 of 100: 2 min, about 2 min left',
        '3/5 test c: failed',
        '4/5 test d: 33 s, about 2 min left',
        '5/6 time e: 1 s, about 2 min left',
    ]
