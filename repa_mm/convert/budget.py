"""Spreading one budget of multiply-adds over the parts of a model.

A part has one or two *axes*: the hidden channels of an FFN, the dimensions of q·k and of values of
its heads. The error of an axis at each of its sizes comes from one elimination or one SVD. How an
error there arrives at the outputs of the model, its *gain*, is measured by narrowing that axis
alone. The sizes are those with the least sum of gain times error that the budget allows, along the
lower convex hulls of cost and error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

#: Sizes of FFNs among which the budget chooses, as fractions of their channels.
FRACTIONS = (0.03, 0.06, 0.1, 0.15, 0.2, 0.25, 0.3, 0.375, 0.45, 0.55, 0.65, 0.75, 0.85, 1.0)


@dataclass
class Axis:
    """Sizes of one axis of a part, increasing up to the present one."""

    sizes: Sequence[int]
    errors: Sequence[float]  # of the part at each size, in any unit
    multiple: int = 1  # chosen sizes are multiples of it, except for the present size
    cost: float = 0.0  # multiply-adds for one unit of the size
    gain: float = 0.0  # error of the model's outputs for one unit of the part's error

    def probe(self) -> int:
        """Return the index of the largest size with a notable error, to measure the gain at."""
        least = 0.02 * self.errors[0]
        return max(i for i, error in enumerate(self.errors) if i == 0 or error >= least)


class _Step(NamedTuple):
    benefit: float
    axis: int
    cost: float
    size: int


def allocate(axes: Sequence[Axis], budget: float) -> list[int]:
    """Choose the sizes of all axes, which take at most ``budget`` multiply-adds together.

    If even the smallest sizes take more, these are chosen.
    """
    sizes = [float(axis.sizes[0]) for axis in axes]
    left = budget - sum(axis.cost * size for axis, size in zip(axes, sizes))
    steps = [step for i, axis in enumerate(axes) for step in _steps(i, axis)]
    # Stable: the steps of one axis come in the order of their sizes, since the hull is convex.
    for step in sorted(steps, key=lambda step: -step.benefit):
        if left <= 0:
            break
        fraction = min(1.0, left / step.cost)
        sizes[step.axis] += fraction * step.size
        left -= fraction * step.cost
    return [
        axis.sizes[-1]
        if size > axis.sizes[-1] - 1e-6  # which need not be a multiple
        else max(axis.sizes[0], int(size / axis.multiple + 1e-6) * axis.multiple)
        for axis, size in zip(axes, sizes)
    ]


def _steps(index: int, axis: Axis) -> list[_Step]:
    """Return the edges of the lower convex hull of an axis, from the smallest size on."""
    found, i = [], 0
    errors = [axis.gain * error for error in axis.errors]
    while i < len(errors) - 1:
        slopes = {
            j: (errors[i] - errors[j]) / (axis.sizes[j] - axis.sizes[i])
            for j in range(i + 1, len(errors))
        }
        j = max(slopes, key=slopes.get)
        size = axis.sizes[j] - axis.sizes[i]
        found.append(_Step(slopes[j] / axis.cost, index, axis.cost * size, size))
        i = j
    return found
