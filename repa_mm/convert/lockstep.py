"""Forward passes on many batches that go from one FFN of a model to the next together.

Every batch runs twice: as a *teacher*, which computes what the pretrained model computes, and as a
*student*, which computes with the FFNs that are fitted so far. Each of these passes is a greenlet
that pauses at every FFN. When all passes have come to an FFN, it is fitted, the students get what
the fitted one returns, and all go on. Nothing is assumed of what lies between the FFNs, but that
passes leave nothing in the model for their way on.
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
    """A pretrained FFN in the place of a block's norm and FFN, at which passes pause.

    Args:
        name (str): The name of the block.
        ffn (ChannelIdleFFN): Norm, FFN and shortcut. One with idle ratio 0 is an ordinary FFN, from
            whatever block: sites fill it as they fill every form.

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
        """What the pretrained block's norm, FFN and shortcut make of tokens (..., C)."""
        return self.whole(x, ffn_output(self.ffn, self.ffn.norm1(x)))

    def whole(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """What stands there returns for tokens x, if its FFN returns z without the shortcut."""
        return x + z if self.ffn.shortcut else z

    def part(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The z with which y = whole(x, z), in float64."""
        return y.double() - x.double() if self.ffn.shortcut else y.double()

    def forward(self, x: torch.Tensor, identity: torch.Tensor | None = None) -> torch.Tensor:
        current = getcurrent()
        return current.pause(self, x) if isinstance(current, _Pass) else self.original(x)


class _Pass(greenlet):
    """A forward pass on a batch. ``switch()`` runs it up to the next FFN, which it returns.

    Attributes:
        x (torch.Tensor): At an FFN, the tokens that it gets.
        y (torch.Tensor): Of a teacher, what the pretrained FFN returns for them.
        is_watched (bool): Whether :func:`watched` looks at it.
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
        # These modes belong to the thread. What a pass has set is for that pass alone.
        no_autocast = torch.autocast(x.device.type, enabled=False)
        with torch.inference_mode(False), torch.no_grad(), no_autocast:
            fitted = self.parent.switch(site)
        y, self.x, self.y = self.y, None, None
        return fitted(x) if y is None else y


def in_lockstep(
    forward: Callable, batches: Sequence, meet: Callable, students: bool = True
) -> None:
    """Run batches as teachers and as students, with a meeting at each FFN.

    Args:
        forward (Callable): Runs a model with :class:`PretrainedFFN` on a batch.
        batches (Sequence): The batches.
        meet (Callable): Gets the :class:`PretrainedFFN` at which all passes are, and for each
            batch the tokens (..., C) that it gets from the student, and what it returns to the
            teacher. Returns a function, of which the students get the output for their tokens.
        students (bool): Whether there are students. The tokens are those of the teachers if not.
            Defaults to True.

    Raises:
        ValueError: If an FFN runs more than once in a pass, or not in all passes.
        Exception: What a pass raises. No pass goes on afterwards.
    """
    roles = (True, False) if students else (True,)
    passes = [_Pass(forward, batch, role) for batch in batches for role in roles]
    passes[0].is_watched = True
    met, fitted = [], None
    try:
        while True:
            where = list(dict.fromkeys(p.switch(fitted) for p in passes))
            if len(where) > 1:
                names = ', '.join(repr(s.name) if s else 'its end' for s in where)
                raise ValueError(
                    f'the forward pass comes to other FFNs in some batches, or in another order: '
                    f'at the same time to {names}'
                )
            if where[0] is None:
                return
            if where[0] in met:
                raise ValueError(
                    f'the FFN of {where[0].name!r} runs more than once in a forward pass, and '
                    'could be fitted to one of its inputs only'
                )
            met.append(where[0])
            pairs = zip(passes[:: len(roles)], passes[len(roles) - 1 :: len(roles)])
            fitted = meet(where[0], [(student.x, teacher.y) for teacher, student in pairs])
    finally:
        for p in passes:
            if p:  # ends it where it is
                p.throw()


@contextmanager
def watched(blocks: dict[str, nn.Module], function: Callable) -> Iterator[None]:
    """Call a function with what each block returns, outside of lockstep or to the first teacher.

    Args:
        blocks (dict): The blocks by name.
        function (Callable): Gets a name and the output.
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
