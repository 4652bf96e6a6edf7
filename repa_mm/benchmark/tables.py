"""Tables of what was measured."""

from collections.abc import Sequence

import numpy as np
import torch
from mmengine.utils.dl_utils import collect_env
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from repa_mm.benchmark.timing import compare
from repa_mm.benchmark.variants import DEPLOY, OURS


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table; the first column holds names."""
    table = Table(box=MARKDOWN)
    for i, column in enumerate(columns):
        table.add_column(column, justify='right' if i else 'left', no_wrap=True)
    for row in rows:
        table.add_row(*row)
    print(f'\n{title}')
    Console(width=200).print(table)


def show_machine() -> None:
    """Print what MMEngine finds out about the machine and its software."""
    for key, value in collect_env().items():
        if key != 'PyTorch compiling details':  # which are longer than all else
            print(f'{key}: {value}')
    print(f'Threads: {torch.get_num_threads()}')


def change(values: np.ndarray, reference: np.ndarray) -> str:
    """Return the change of the median in percent, with its interval: '-40.0 % [-41.2, -38.9]'."""
    ratio, low, high = (100 * (value - 1) for value in compare(values, reference))
    return f'{ratio:+.1f} % [{low:+.1f}, {high:+.1f}]'


def latency_rows(times: dict[str, np.ndarray], batch_size: int) -> list[list[str]]:
    """Return rows of name, milliseconds, images a second and two changes.

    The first change is against the first model. The second is the part of it that is due to the
    merge: that of the deploy form against the vanilla model with our attention.
    """
    rows = []
    first = next(iter(times))
    for name, values in times.items():
        median = np.median(values)
        row = [name, f'{median:.1f}', f'{1e3 * batch_size / median:.2f}']
        row.append(change(values, times[first]) if name != first else '')
        row.append(change(values, times[OURS]) if name == DEPLOY and OURS in times else '')
        rows.append(row)
    return rows


def share_rows(
    times: dict[str, np.ndarray], spent: dict[str, dict[str, np.ndarray]]
) -> list[list[str]]:
    """Return rows of model, part, milliseconds, and the share in those of the model."""
    return [
        [f'{name}, {part}', f'{np.median(values):.1f}', f'{np.median(values / times[name]):.1%}']
        for name, parts in spent.items()
        for part, values in {'all': times[name], **parts}.items()
    ]


def ratios(times: dict[str, np.ndarray]) -> dict[str, str]:
    """Return the time of each callable but the first, as a ratio to that of the first."""
    first, *others = times
    return {name: f'{compare(times[name], times[first])[0]:.2f}' for name in others}
