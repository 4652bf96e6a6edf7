"""What a long command says of its steps: how many there are, and how long they take."""

import io
import logging
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from statistics import fmean
from typing import Any

import torch
from mmengine.logging import MMLogger

from repa_mm.measure.timing import duration


@contextmanager
def quiet() -> Iterator[None]:
    """Hide what the codebases, COCO and NNCF print and log, and where weights come from."""
    logger, disabled = MMLogger.get_current_instance(), logging.root.manager.disable
    level = logger.level
    logger.setLevel('ERROR')  # MMEngine's loggers do not see that others are disabled
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter('ignore')
            yield
    finally:
        logger.setLevel(level)
        logging.disable(disabled)


class Steps:
    """Runs steps, and guesses how long the others take by those of the same kind before.

    ``left`` has how many are left at most, by their kind: the first word of a step's name.
    """

    def __init__(self) -> None:
        self.left: Counter[str] = Counter()
        self.done, self.took, self.told, self.out = 0, defaultdict(list), 0.0, sys.stdout

    def run(self, what: str, do: Callable, *args) -> Any:
        """Say what is done and how long it took, and hide what others print meanwhile."""
        kind, how, self.told, self.out = what.split()[0], 'failed', time.monotonic(), sys.stdout
        self.done, begin = self.done + 1, self.told
        self.left -= Counter([kind])
        print(f'{self.done}/{self.done + self.left.total()} {what}', end='', flush=True)
        try:
            with quiet(), torch.no_grad():
                found = do(*args)
            self.took[kind].append(time.monotonic() - begin)
            how = duration(self.took[kind][-1]) + self._time_left()
        finally:
            print(f': {how}', flush=True)
        return found

    def _time_left(self) -> str:
        known = [kind for kind in self.left if self.took[kind]]
        seconds = sum(self.left[kind] * fmean(self.took[kind]) for kind in known)
        about = 'about' if len(known) == len(self.left) else 'more than'
        return f', {about} {duration(seconds)} left' if seconds >= 1 else ''

    def tell(self, how: str) -> None:
        """Say how far a step is, at most once a minute."""
        if time.monotonic() > self.told + 60:
            self.told = time.monotonic()
            print(f'\n    {how}', end='', file=self.out, flush=True)
