"""What a conversion reports of each block, as a table."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.nn as nn

#: Sizes of parts, by name: the number of channels of an FFN; of a channel-idle one the number of
#: active channels and of rows of the matrix that the idle ones merge into; or the dimensions of
#: queries and keys, and of values, in a head.
Sizes = dict[str, tuple[int, ...]]


@dataclass
class BlockReport:
    """The fit of one part."""

    name: str  # of the block, or of its attention
    before: tuple[int, ...]  # its sizes before the conversion
    after: tuple[int, ...]
    costs: tuple[float, ...]  # multiply-adds for one unit of each of its sizes, for one image
    unexplained: float = 0.0  # share of the targets' variance that the narrower part leaves
    # Number of heads whose output hardly varies on the images: no fit can know what they do
    # elsewhere.
    constant_heads: int = 0

    @property
    def gmacs(self) -> tuple[float, float]:
        """1e9 multiply-adds of the (merged) part for one image, after and before the conversion."""
        return tuple(
            sum(cost * size for cost, size in zip(self.costs, sizes, strict=True)) / 1e9
            for sizes in (self.after, self.before)
        )


class Clock:
    """Estimates the time that the fits still to make take, from the last one of each kind of part.

    A fit takes time with the parameters of its part. The passes to the next part take as long as
    those to the last one.
    """

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        self.numbers = {
            name: (type(part), sum(p.numel() for p in part.parameters()))
            for name, part in parts.items()
        }
        self.rates, self.last = {}, time.monotonic()

    def start(self) -> None:
        """Note that the passes have reached the next part."""
        self.reached = time.monotonic()

    def left(self, name: str) -> float:
        """Return the seconds left after the fit of a part."""
        (kind, number), passes = self.numbers.pop(name), self.reached - self.last
        self.last = time.monotonic()
        self.rates[kind] = (self.last - self.reached) / number
        most = max(self.rates.values())
        return sum(passes + n * self.rates.get(k, most) for k, n in self.numbers.values())


@dataclass
class ConversionReport:
    """The report of a conversion, which prints as a table."""

    blocks: list[BlockReport] = field(default_factory=list)  # in the order of the forward pass
    #: Names of the blocks that stay as they are, with the reasons.
    skipped: dict[str, str] = field(default_factory=dict)
    #: For each tensor that ``forward`` returns, its mean square change on the held-out batches,
    #: relative to its variance.
    differences: list[float] = field(default_factory=list)

    @property
    def sizes(self) -> Sizes:
        """New sizes of the parts with new weights, by name: those that a config must have."""
        return {block.name: block.after for block in self.blocks if block.after != block.before}

    @property
    def gmacs(self) -> tuple[float, float]:
        """Those of all blocks together."""
        after, before = zip(*(block.gmacs for block in self.blocks))
        return sum(after), sum(before)

    @property
    def fraction(self) -> float:
        """Fraction of the multiply-adds of these blocks that is left."""
        after, before = self.gmacs
        return after / before

    def __str__(self) -> str:
        rows = [('block', 'width', 'of', 'unexplained', 'GMACs', 'before')]
        for b in self.blocks:
            sizes = ('+'.join(map(str, sizes)) for sizes in (b.after, b.before))
            rows.append((b.name, *sizes, f'{b.unexplained:.4f}', *(f'{x:.3f}' for x in b.gmacs)))
        rows.append(('all', '', '', '', *(f'{x:.3f}' for x in self.gmacs)))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ['  '.join(map(str.ljust, row, widths)).rstrip() for row in rows]
        if self.differences:
            shares = ', '.join(f'{100 * x:.{2 if x < 1 else 3}g} %' for x in self.differences)
            lines.append(f'on held-out images the outputs differ by {shares} of their variance')
        lines += [
            f'warning: {b.name}: the output of {b.constant_heads} heads is nearly constant on '
            'these images: give other images'
            for b in self.blocks
            if b.constant_heads
        ]
        return '\n'.join(lines + [f'not converted: {k}: {why}' for k, why in self.skipped.items()])
