"""The choice among rows of the table, the first of which is the original."""

from collections.abc import Sequence


def meets(row: dict, max_loss: float) -> bool:
    """Return True if the whole interval of a row's difference is above the floor."""
    return bool(row['interval']) and row['interval'][0] >= -max_loss


def is_fast(row: dict, latency: float) -> bool:
    """Return True if a row takes at most this fraction of the original's time."""
    return row['speedup'] * latency >= 1


def choose(
    rows: Sequence[dict], max_loss: float | None = None, latency: float | None = None
) -> dict | None:
    """Return the fastest row that loses at most so much, or the one that loses least in its time.

    Args:
        rows (Sequence[dict]): The rows. The first is never chosen, and nothing slower than it.
        max_loss (float, optional): The largest loss in points, of the whole interval.
        latency (float, optional): The largest fraction of the original's time. Of rows that lose
            the same, or were not tested, it is the fastest of the widest models.

    Returns:
        dict | None: The row, or None if no row meets both.
    """
    found = [row for row in rows[1:] if is_fast(row, latency or 1)]
    if max_loss is not None:
        found = [row for row in found if meets(row, max_loss)]

    def rank(row: dict) -> tuple:
        loss = () if latency is None else (row['difference'] or 0, row['budget'])
        return *loss, row['speedup']

    return max(found, key=rank, default=None)


def unsure(
    rows: Sequence[dict], chosen: dict | None, max_loss: float | None, num_images: int
) -> list[str]:
    """Return a line that names faster rows for which the images were too few to tell, or none."""
    least = chosen['speedup'] if chosen else 1
    found = [
        f'{row["candidate"]} ({row["format"]})'
        for row in rows[1:]
        if max_loss is not None and row['interval'] and row['speedup'] > least
        and row['difference'] >= -max_loss > row['interval'][0]
    ]  # fmt: skip
    return found and [
        f'{num_images} images are too few to tell whether these lose more than {max_loss} points: '
        f'{", ".join(found)}. Test on more images (--num-images)'
    ]
