"""The table of latencies that `tools/benchmark.py` prints."""

from collections.abc import Callable, Sequence

import numpy as np

from repa_mm.benchmark.timing import change, measure
from repa_mm.benchmark.variants import DEPLOY, MODEL, OURS


class Counting:
    """A call that notes the numbers of objects that a detector finds in images, in ``objects``."""

    def __init__(self, call: Callable) -> None:
        self.call, self.objects = call, []

    def __call__(self, data):
        found = self.call(data)
        if isinstance(found, list):  # of data samples
            self.objects += [len(x.pred_instances) for x in found if 'pred_instances' in x]
        return found


def latency_rows(
    calls: dict[str, Callable], batches: Sequence, batch_size: int, repeats: int
) -> list[dict[str, str]]:
    """Time calls in turn, and return the rows of a table, as dicts with its columns.

    The column 'against …' compares each model with the first one. The column 'against our parts'
    compares the model of the config with the stock model with our parts: it has what the merge
    gains, or narrower parts. Detectors have the number of objects that they find in an image.

    Args:
        calls (dict): What runs each model, by name.
        batches (Sequence): What to run them on, in each turn another one.
        batch_size (int): Number of images in a batch.
        repeats (int): Number of turns.
    """
    calls = {name: Counting(call) for name, call in calls.items()}
    times = measure(calls, batches, repeats, per_turn=True)
    first, rows = next(iter(times)), []
    for name, values in times.items():
        row = dict(model=name, ms=f'{np.median(values):.1f}')
        middle = np.median(values)
        if len(batches) > 1:  # images differ
            middle = values.mean()
            row['quartiles'] = '{:.1f} to {:.1f}'.format(*np.percentile(values, [25, 75]))
        row['images/s'] = f'{1e3 * batch_size / middle:.2f}'
        row[f'against {first}'] = '' if name == first else change(values, times[first])
        compared = name in (DEPLOY, MODEL) and OURS in times
        row['against our parts'] = change(values, times[OURS]) if compared else ''
        if calls[name].objects:
            objects = np.mean(calls[name].objects)
            row['objects'] = f'{objects:.1f}' if objects >= 1 else 'next to none'
        rows.append(row)
    return rows
