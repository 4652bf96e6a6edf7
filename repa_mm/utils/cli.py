"""Errors and tables for people."""
import os
import signal
import sys
from contextlib import contextmanager
from typing import Iterator, List, Sequence

from ..reparam import CheckpointError


def _exit(signum, frame):
    # An exception, so that temporary files are removed.
    sys.exit(128 + signum)


@contextmanager
def clear_errors(*kinds: type) -> Iterator[None]:
    """End the program with one line instead of a stack trace.

    Args:
        *kinds: Exceptions this is for. Defaults to those that bad input leads
            to; while a program sets up, ``Exception`` is a good choice.
    """
    kinds = kinds or (CheckpointError, ImportError, OSError, ValueError)
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    except kinds as error:
        if os.environ.get('REPA_MM_TRACEBACK'):
            raise
        text = ' '.join(str(error).split()) or type(error).__name__
        if not isinstance(error, (CheckpointError, OSError, ValueError)):
            text = f'{type(error).__name__}: {text}'
        sys.exit(f'error: {text} (REPA_MM_TRACEBACK=1 shows where)')
    finally:
        signal.signal(signal.SIGTERM, before)


def align(rows: Sequence[Sequence[str]], left: int = 1) -> List[str]:
    """Rows of a table as lines of text, with columns of equal width.

    Args:
        rows (Sequence[Sequence[str]]): As many cells each.
        left (int): Number of columns that are aligned to the left; the others
            are to the right. Defaults to 1.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for cells in rows:
        cells = [c.ljust(w) if i < left else c.rjust(w)
                 for i, (c, w) in enumerate(zip(cells, widths))]
        lines.append('   '.join(cells).rstrip())
    return lines
