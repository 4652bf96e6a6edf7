"""Checking that a block computes what its family says."""

from collections.abc import Sequence

import torch
import torch.nn as nn

from repa_mm.convert.lockstep import Pausing
from repa_mm.convert.parts import check_activations
from repa_mm.surgery import copied

EQUAL = (
    '{}, does not use its FFN as the OpenMMLab block of this name does: its output changes by '
    '{:.1%} when an equal FFN takes its place. Rename its class, or give another module in where'
)
SUM = (
    '{}, is not x + ffn(norm(x)): its output changes by {:.1%} although this sum stays the same. '
    'Register a matching Family'
)


def tolerance(output: torch.Tensor) -> float:
    """Return the relative change of an output that rounding explains."""
    return 0.05 if output.element_size() < 4 else 1e-3


@torch.no_grad()
def check_block(block: nn.Module, parts: Sequence[Pausing], args: tuple, kwargs: dict) -> None:
    """Raise a ``ValueError`` if a block does not compute what its family says.

    With the pretrained parts in place, it must compute the same. And since an FFN is fitted to make
    up for what its input has lost, the block must use the sum of both alone: if the FFN returns a
    constant minus its input, the output must not depend on the tokens of the block. The block does
    not have the parts in it, and ``args`` and ``kwargs`` are what the model calls it with.
    """
    changed = copied(block)
    for part in parts:
        part.put(part.site.at(changed))

    def output(block: nn.Module, shift: float = 0.0) -> torch.Tensor:
        # Copies, since a block may change tensors in place. The first tensor is the tokens.
        values = [x.clone() if torch.is_tensor(x) else x for x in (*args, *kwargs.values())]
        i = next(i for i, x in enumerate(values) if torch.is_tensor(x) and x.is_floating_point())
        values[i] = values[i] + shift * values[i].flip(-1)
        y = block.forward(*values[: len(args)], **dict(zip(kwargs, values[len(args) :])))
        return y if torch.is_tensor(y) else y[0]

    def compare(found: torch.Tensor, known: torch.Tensor, message: str) -> None:
        change = float((found - known).double().norm() / known.double().norm().clamp(min=1e-300))
        if not change <= tolerance(known):
            name = f'{parts[0].site.block_name!r}, a {type(block).__name__}'
            raise ValueError(message.format(name, change))

    known = output(block)
    check_activations(parts[0].site.block_name, known)
    compare(output(changed), known, EQUAL)
    size = known.abs().max()
    for part in parts:
        if part.compensates:

            def opposite(x: torch.Tensor, *args, part=part, **kwargs) -> torch.Tensor:
                return part.whole(x, size * torch.linspace(-1, 1, x.shape[-1]).to(x) - x)

            with part.replaced(opposite):
                compare(output(changed, shift=1.0), output(changed), SUM)
