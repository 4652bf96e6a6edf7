"""Forward passes on many batches that go from one FFN of a model to the next together.

Every batch runs twice: as a *teacher*, which computes what the pretrained model computes, and as a
*student*, which computes with the FFNs that are fitted so far. Each pass is a greenlet that pauses
at every FFN. When all passes have reached an FFN, it is fitted, the students get the outputs of the
fitted FFN, and all passes go on. The model must keep no state between two FFNs of one pass.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from greenlet import getcurrent, greenlet

from repa_mm.convert.regression import ffn_output
from repa_mm.reparam import ChannelIdleFFN


class PretrainedFFN(nn.Module):
    """A pretrained FFN that replaces the norm and FFN of a block, and pauses passes.

    Args:
        name (str): Name of the block.
        ffn (ChannelIdleFFN): Norm, FFN and shortcut. A channel-idle FFN with idle ratio 0 computes
            the same as an ordinary FFN, and sites can fill it from any block.

    Raises:
        ValueError: If the activation mixes channels, or treats them differently.
    """

    contains_norm = True

    def __init__(self, name: str, ffn: ChannelIdleFFN) -> None:
        super().__init__()
        self.name, self.ffn = name, ffn
        hidden = torch.linspace(-3, 3, 32).to(ffn.fc1.weight).reshape(4, 8)
        try:
            same = torch.allclose(ffn.act(hidden)[:, ::3], ffn.act(hidden[:, ::3]), atol=1e-3)
        except RuntimeError:
            same = False
        if not same:
            kind = type(ffn.act).__name__
            raise ValueError(
                f'its activation, a {kind}, mixes channels, or treats them differently'
            )

    def original(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the pretrained norm, FFN and shortcut for tokens (..., C)."""
        return self.whole(x, ffn_output(self.ffn, self.ffn.norm1(x)))

    def whole(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Return the output for tokens x, given the FFN's output z without shortcut."""
        return x + z if self.ffn.shortcut else z

    def part(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return z such that y = whole(x, z), in float64."""
        return y.double() - x.double() if self.ffn.shortcut else y.double()

    def forward(self, x: torch.Tensor, identity: torch.Tensor | None = None) -> torch.Tensor:
        current = getcurrent()
        return current.pause(self, x) if isinstance(current, _Pass) else self.original(x)


class _Pass(greenlet):
    """A forward pass on a batch; ``switch()`` runs it up to the next FFN and returns the FFN.

    Attributes:
        x (torch.Tensor): Input of the FFN, while the pass pauses there.
        y (torch.Tensor): Output of the pretrained FFN for ``x``, in a teacher.
        is_watched (bool): Whether :func:`watched` sees the outputs of this pass.
    """

    x = y = None
    is_watched = False

    def __init__(self, forward: Callable, batch: Any, is_teacher: bool) -> None:
        super().__init__()
        self.forward, self.batch, self.is_teacher = forward, batch, is_teacher

    def run(self, _) -> None:
        self.forward(self.batch)

    def pause(self, site: PretrainedFFN, x: torch.Tensor) -> torch.Tensor:
        self.x, self.y = x, site.original(x) if self.is_teacher else None
        # Gradient, inference and autocast modes belong to the thread, but each pass sets its own.
        no_autocast = torch.autocast(x.device.type, enabled=False)
        with torch.inference_mode(False), torch.no_grad(), no_autocast:
            fitted = self.parent.switch(site)
        y, self.x, self.y = self.y, None, None
        return fitted(x) if y is None else y


def in_lockstep(
    forward: Callable, batches: Sequence, meet: Callable, students: bool = True
) -> None:
    """Run batches as teachers and as students, which meet at each FFN.

    Args:
        forward (Callable): Runs a model that has a :class:`PretrainedFFN` in each block on a batch.
        batches (Sequence): The batches.
        meet (Callable): Called with the :class:`PretrainedFFN` that all passes have reached, and a
            list with, for each batch, the student's input and the teacher's output of the FFN, both
            (..., C). Returns the function that computes the students' outputs from their inputs.
        students (bool): Run students as well. Without students, ``meet`` gets the inputs of the
            teachers. Defaults to True.

    Raises:
        ValueError: If an FFN runs more than once in a pass, or not in all passes.
        Exception: Any error of a pass. It ends all passes.
    """
    roles = (True, False) if students else (True,)
    passes = [_Pass(forward, batch, role) for batch in batches for role in roles]
    passes[0].is_watched = True
    met, fitted = [], None
    try:
        while True:
            where = list(dict.fromkeys(p.switch(fitted) for p in passes))
            if len(where) > 1:
                names = ', '.join(repr(s.name) if s else 'the end' for s in where)
                raise ValueError(
                    'the forward pass must reach the same FFNs in the same order for all batches, '
                    f'but at one point some are at {names}'
                )
            if where[0] is None:
                return
            if where[0] in met:
                raise ValueError(
                    f'the FFN of {where[0].name!r} runs more than once in a forward pass, but can '
                    'be fitted to one of its inputs only: give None for this block in keep'
                )
            met.append(where[0])
            pairs = zip(passes[:: len(roles)], passes[len(roles) - 1 :: len(roles)])
            fitted = meet(where[0], [(student.x, teacher.y) for teacher, student in pairs])
    finally:
        for p in passes:
            if p:  # unfinished: throw() ends it
                p.throw()


@contextmanager
def watched(blocks: dict[str, nn.Module], function: Callable) -> Iterator[None]:
    """Call a function with the output of each block, in the first teacher or outside lockstep.

    Args:
        blocks (dict): The blocks by name.
        function (Callable): Called with the name of a block and its (first) output.
    """

    def note(name: str, output: torch.Tensor | Iterable) -> None:
        if getattr(getcurrent(), 'is_watched', True):
            function(name, output if isinstance(output, torch.Tensor) else output[0])

    handles = [
        block.register_forward_hook(lambda m, args, output, name=name: note(name, output))
        for name, block in blocks.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
