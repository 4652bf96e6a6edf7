"""Rows of the table: which are found, and which of them is chosen."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any


def column(
    what: str, head: str = '', show: str = '', wide: bool = False, default: Any = None
) -> Any:
    """Return a field of :class:`Row`: ``what`` it is, and its column in tables, if it has one.

    ``show`` formats the row. A ``wide`` column is in reports alone.
    """
    return field(default=default, metadata=dict(what=what, head=head, show=show, wide=wide))


# fmt: off
@dataclass(frozen=True)
class Candidate:
    """A model that is measured in several formats."""

    candidate: str = column(
        'stock, merged, exact parts, or the share of the multiply-adds of its FFNs and attention '
        'that is left', 'candidate', '{0.mark}{0.candidate}')
    config: str = column('path of its config')
    checkpoint: str = column('path of its checkpoint')
    budget: float = column('what is left of these multiply-adds', default=1.0)


@dataclass(frozen=True)
class Row(Candidate):
    """A candidate in a format. What is not measured or tested is None."""

    format: str = column('what runs it', 'format', '{0.format}', default='PyTorch')
    file: str | None = column('path of its file, if it has one')
    ms: float | None = column('median of its times', 'ms', '{0.ms:.1f}')
    ms_interval: Sequence[float] | None = column('their quartiles')
    ms_p95: float | None = column(
        'their 95th percentile', '95th percentile', '{0.ms_p95:.1f}', wide=True)
    stock_ms: float | None = column(
        "median of the original's times in the same turns", 'stock', '{0.stock_ms:.1f}')
    speedup: float | None = column(
        'stock_ms divided by ms', '× stock [95 %]',
        '{0.speedup:.2f} [{0.speedup_interval[0]:.2f}, {0.speedup_interval[1]:.2f}]')
    speedup_interval: Sequence[float] | None = column('its 95 % interval over turns')
    metric: float | None = column('the metric in points', '{}', '{0.about}{0.metric:.2f}')
    difference: float | None = column(
        'its difference from the original', 'difference [95 %]',
        '{0.difference:+.2f} [{0.interval[0]:.2f}, {0.interval[1]:.2f}]')
    interval: Sequence[float] | None = column(
        'the 95 % interval of the difference, by a paired bootstrap over images')
    tested_in: str | None = column(
        'the format of the test: float32 formats of a candidate that find the same in an image '
        'share one')
    mb: float | None = column('size of its file or weights, in MB', 'MB', '{0.mb:.1f}', wide=True)
    chosen: bool = column('whether it is chosen', default=False)
# fmt: on

    @property
    def name(self) -> str:
        """Candidate and format, which no other row has."""
        return f'{self.candidate}, {self.format}'

    @property
    def mark(self) -> str:
        """What precedes the chosen row in tables."""
        return '→ ' if self.chosen else ''

    @property
    def about(self) -> str:
        """What precedes a metric that was tested in another format."""
        return '' if self.tested_in == self.format else '≈ '

    def at(self, end: int) -> 'Row':
        """Return the row with the speedup at an end of its interval: 0 is the lower one."""
        return replace(self, speedup=self.speedup_interval[end])


Row.__doc__ += '\n\nAttributes:\n' + '\n'.join(
    f'    {one.name}: {one.metadata["what"]}' for one in fields(Row)
)


@dataclass(frozen=True)
class Target:
    """What the chosen row must keep, as for :func:`~repa_mm.speed_up`."""

    max_loss: float | None = None
    latency: float | None = None

    def __post_init__(self) -> None:
        if self.latency is not None and not 0 < self.latency < 1:
            raise ValueError(f'latency must be in (0, 1), not {self.latency}')
        if self.max_loss is not None and not 0 <= self.max_loss < 100:
            raise ValueError(f'max_loss must be in [0, 100), not {self.max_loss}')

    def __str__(self) -> str:
        loss, latency = self.max_loss, self.latency
        found = [f'loses at most {loss} points'] if loss is not None else []
        found += [f"takes at most {latency:.0%} of stock's time"] if latency is not None else []
        return ' and '.join(found)

    @property
    def is_loss_alone(self) -> bool:
        """True if the fastest row above the floor is sought."""
        return self.max_loss is not None and self.latency is None

    def keeps(self, row: Row) -> bool:
        """Return True if the whole interval of a row's difference is above the floor, if any."""
        return self.max_loss is None or bool(row.interval and row.interval[0] >= -self.max_loss)

    def worth(self, row: Row) -> tuple:
        """Return what is larger for a better row, or () for one that cannot be chosen.

        What is slower than the original is never chosen. With a latency, it is the row with the
        least loss; of those that lose the same, or are not tested, the fastest of the widest model.
        """
        if row.speedup * (self.latency or 1) < 1 or not self.keeps(row):
            return ()
        loss = () if self.latency is None else (row.difference or 0, row.budget)
        return *loss, row.speedup


def walk(candidates: Iterable[Candidate], rows_of: Callable, target: Target) -> list[Row]:
    """Return the rows of candidates, given those of one in formats of floats, or in int8.

    With a floor, the walk from wide to narrow ends at the first model that falls short in all
    formats of floats that it has: a failure is not a loss. Quantizing takes minutes, so int8 goes
    from narrow to wide over the models before that one, and, if the loss alone counts, ends at the
    first that keeps the floor.
    """
    rows, kept = [], []
    for candidate in candidates:
        rows += (new := rows_of(candidate, False))
        if candidate.budget < 1 and new and not any(map(target.keeps, new)):
            break
        kept.insert(0, candidate)
    for candidate in kept:
        rows += (new := rows_of(candidate, True))
        if target.is_loss_alone and any(map(target.keeps, new)):
            break
    names = list(dict.fromkeys(row.candidate for row in rows))
    return sorted(rows, key=lambda row: names.index(row.candidate))


def choose(rows: Sequence[Row], target: Target) -> Row | None:
    """Return the row of most worth, if any can be chosen. The first row, the original, cannot."""
    best = max(rows[1:], key=target.worth, default=None)
    return best if best and target.worth(best) else None


def contenders(rows: Sequence[Row], target: Target) -> tuple[Row | None, list[Row]]:
    """Return the row to choose, and its rivals, those with the fastest upper ends first.

    A rival would be chosen with a speedup at the upper end of its interval, if the chosen row's
    were at the lower end.
    """
    chosen = choose(rows, target)
    least = target.worth(chosen.at(0)) if chosen else ()
    rivals = [row for row in rows[1:] if row is not chosen and target.worth(row.at(1)) > least]
    return chosen, sorted(rivals, key=lambda row: -row.speedup_interval[1])


def settle(rows: list[Row], time_again: Callable, target: Target) -> tuple[list[Row], Row | None]:
    """Return the rows and the one to choose, by times that were taken in turn with its rivals.

    A row was timed in turn with the original alone, in a minute that may have been a busy one.
    ``time_again`` returns one or two rows with new times. More at a time would take too much
    memory, as the original is open beside them.
    """
    timed: set[str] = set()
    while True:
        chosen, rivals = contenders(rows, target)
        rivals.sort(key=lambda row: row.name in timed)
        pair = ([chosen, *rivals] if chosen else rivals)[:2]
        if all(row.name in timed for row in pair):
            return rows, chosen
        again = {row.name: row for row in time_again(pair)}
        rows = [again.get(row.name, row) for row in rows]
        timed |= again.keys()


def unsure(rows: Sequence[Row], chosen: Row | None, target: Target) -> list[str]:
    """Return a line that names the row to choose if its difference were certain, or none."""
    if target.max_loss is None:
        return []
    found = choose([replace(r, interval=r.interval and [r.difference]) for r in rows], target)
    if not found or chosen and found.name == chosen.name:
        return []
    return [
        f'The images are too few to tell whether {found.candidate} ({found.format}) loses '
        f'more than {target.max_loss} points: test on more (--num-images)'
    ]
