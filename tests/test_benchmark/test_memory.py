"""The peak of memory is that of the call, however much was freed before it."""

import sys

import numpy as np
import pytest

from repa_mm.benchmark.memory import peak_memory


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_the_peak_of_a_call():
    def call():
        kept = np.ones(4_000_000)
        np.ones(8_000_000)  # freed before the end
        return kept

    np.ones(40_000_000)  # a higher peak before
    kept, found = peak_memory(call)
    assert len(kept) == 4_000_000 and 90 < found < 120
    assert peak_memory(lambda: None)[1] < 20


def test_a_system_that_does_not_tell(monkeypatch):
    def missing(*_):
        raise FileNotFoundError

    monkeypatch.setattr('builtins.open', missing)
    found = peak_memory(lambda: 3)
    monkeypatch.undo()
    assert found == (3, None)
