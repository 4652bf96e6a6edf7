"""The table of latencies that `tools/benchmark.py` prints."""

import numpy as np

from repa_mm.measure.timing import change
from repa_mm.measure.variants import DEPLOY, MODEL, OURS


def latency_rows(
    times: dict[str, np.ndarray],
    batch_size: int,
    varied: bool = False,
    objects: dict[str, list] | None = None,
) -> list[dict[str, str]]:
    """Return the rows of a table, as dicts with its columns.

    The column 'against …' compares each model with the first one. The column 'against our parts'
    compares the model of the config with the stock model with our parts: it has what the merge
    gains, or narrower parts. ``times`` are in milliseconds. If images are ``varied``, rates are
    those of means, and quartiles are shown. ``objects`` are the numbers that detectors found.
    """
    first, rows = next(iter(times)), []
    for name, values in times.items():
        middle = values.mean() if varied else np.median(values)
        row = dict(model=name, ms=f'{np.median(values):.1f}')
        if varied:
            row['quartiles'] = '{:.1f} to {:.1f}'.format(*np.percentile(values, [25, 75]))
        row['images/s'] = f'{1e3 * batch_size / middle:.2f}'
        row[f'against {first}'] = '' if name == first else change(values, times[first])
        compared = name in (DEPLOY, MODEL) and OURS in times
        row['against our parts'] = change(values, times[OURS]) if compared else ''
        if objects and objects[name]:
            number = np.mean(objects[name])
            row['objects'] = f'{number:.1f}' if number >= 1 else 'next to none'
        rows.append(row)
    return rows
