"""Rows of the table of latencies."""

import numpy as np

from repa_mm.measure.latency import latency_rows

TIMES = {
    'stock': np.full(3, 100.0),
    'stock with our parts': np.full(3, 80.0),
    'deploy form': np.array([50.0, 60, 70]),
}


def test_rows():
    numbers = dict(zip(TIMES, ([0, 1], [2, 2], [7, 8])))
    first, _, last = latency_rows(TIMES, 2, objects=numbers)
    assert first == {
        'model': 'stock', 'ms': '100.0', 'images/s': '20.00', 'against stock': '',
        'against our parts': '', 'objects': 'next to none',
    }  # fmt: skip
    assert last['against stock'] == '-40.0 % [-50.0, -30.0]'
    assert last['against our parts'].startswith('-25.0 %') and last['objects'] == '7.5'
    *_, last = latency_rows(TIMES, 1, varied=True, objects=dict.fromkeys(TIMES, []))
    assert last['quartiles'] == '55.0 to 65.0' and last['images/s'] == '16.67'
    assert 'objects' not in last  # of a backbone or a segmentor
