"""Forward passes on many batches that go from one part of a model to the next together.

Every batch runs twice: as a *teacher*, which computes what the pretrained model computes, and as a
*student*, which computes with the parts that are fitted so far. Each pass is a greenlet that pauses
at every part::

                  batch 1              batch 2
             teacher   student    teacher   student
                |         |          |         |
    part A      x0        x          x0        x      all pause
                |   fit A', so that A'(x) is A(x0)
              A(x0)     A'(x)      A(x0)     A'(x)    all go on
                |         |          |         |
    part B      x0        x          x0        x      all pause, and so on

The model must keep no state between two parts of one pass.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn

try:
    from greenlet import getcurrent, greenlet
except ImportError as error:
    raise ImportError(f'{error}: pip install -e ".[speed_up]" installs it') from error


class Pausing(nn.Module):
    """A module of the block ``name`` in which the passes of :func:`in_lockstep` pause."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._instead: Callable | None = None

    def original(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Compute what the pretrained module computes for tokens (..., C)."""
        raise NotImplementedError

    def forward(self, *args, **kwargs) -> torch.Tensor:
        current = getcurrent()
        is_teacher = isinstance(current, _Pass) and current.pause(self, *args)
        instead = None if is_teacher else self._instead
        return (instead or self.original)(*args, **kwargs)

    @contextmanager
    def replaced(self, function: Callable) -> Iterator[None]:
        """Compute a function instead, except in teachers."""
        self._instead = function
        try:
            yield
        finally:
            self._instead = None


class _Pass(greenlet):
    """A forward pass on a batch; ``switch()`` runs it up to the next site and returns the site."""

    inputs = None  # positional arguments of the site, while the pass pauses there

    def __init__(self, forward: Callable, batch: Any, is_teacher: bool) -> None:
        super().__init__()
        self.forward, self.batch, self.is_teacher = forward, batch, is_teacher

    def run(self, _) -> None:
        self.forward(self.batch)

    def pause(self, site: Pausing, *args) -> bool:
        """Wait for the other passes at a site; return True in a teacher."""
        self.inputs = args
        # Gradient, inference and autocast modes belong to the thread, but each pass sets its own.
        no_autocast = torch.autocast(args[0].device.type, enabled=False)
        with torch.inference_mode(False), torch.no_grad(), no_autocast:
            self.parent.switch(site)
        # Outputs come after the pause, since those of all teachers at once take much memory.
        self.inputs = None
        return self.is_teacher


def in_lockstep(forward: Callable, batches: Sequence, students: bool = True) -> Generator:
    """Run batches as teachers and as students, which meet at each site.

    Yields the :class:`Pausing` that all passes have reached, and a list with, for each batch, the
    positional arguments of the student and of the teacher there. Students then go on with what is
    :meth:`~Pausing.replaced`. Returns what ``forward`` returns for the first batch, in its teacher
    and, if there are any, in its student.

    Args:
        forward (Callable): Runs a model that has a :class:`Pausing` module at each site on a batch.
        batches (Sequence): What ``forward`` is called with.
        students (bool): Run students as well. Without them, both arguments are the teacher's.

    Raises:
        ValueError: If a site runs more than once in a pass, or not in all passes.
    """
    teachers = [_Pass(forward, batch, True) for batch in batches]
    others = [_Pass(forward, batch, False) for batch in batches] if students else []
    passes, outputs = teachers + others, []
    for one in [*teachers[:1], *others[:1]]:
        one.forward = lambda batch: outputs.append(forward(batch))
    met = []
    try:
        while True:
            reached = list(dict.fromkeys(p.switch(None) for p in passes))
            if len(reached) > 1:
                names = ', '.join(repr(s.name) if s else 'the end' for s in reached)
                raise ValueError(
                    'the forward pass must reach the same blocks in the same order for all '
                    f'batches, but at one point some are at {names}'
                )
            if reached[0] is None:
                return outputs
            if reached[0] in met:
                raise ValueError(
                    f'{reached[0].name!r} runs more than once in a forward pass, but can '
                    'be fitted to one of its inputs only: give another module in where'
                )
            met.append(reached[0])
            pairs = zip(others or teachers, teachers)
            yield reached[0], [(student.inputs, teacher.inputs) for student, teacher in pairs]
    finally:
        for p in passes:
            if p:  # unfinished: throw() ends it
                p.throw()
