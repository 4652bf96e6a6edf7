"""What a conversion reports of each block, as a table."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from repa_mm.apis.features import percent

#: Sizes of parts, by name: the number of channels of an FFN; of a channel-idle one the number of
#: active channels and of rows of the matrix that the idle ones merge into; or the dimensions of
#: queries and keys, and of values, in a head.
Sizes = dict[str, tuple[int, ...]]


@dataclass
class BlockReport:
    """The fit of one part.

    Attributes:
        name (str): Name of the block, or of its attention.
        before (tuple[int, ...]): Its sizes before the conversion.
        after (tuple[int, ...]): Its sizes after the conversion.
        costs (tuple[float, ...]): Multiply-adds for one unit of each of its sizes, for one image.
        unexplained (float): Share of the targets' variance that the narrower part does not explain.
        changed (bool): The part has new weights. Those before the first narrower part have not.
        constant_heads (int): Number of heads whose output hardly varies on the images.
    """

    name: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    costs: tuple[float, ...]
    unexplained: float = 0.0
    changed: bool = False
    constant_heads: int = 0

    @property
    def gmacs(self) -> float:
        """1e9 multiply-adds of the part for one image before the conversion."""
        return self._gmacs(self.before)

    @property
    def narrow_gmacs(self) -> float:
        """1e9 multiply-adds of the part, merged if it has a training form, after the conversion."""
        return self._gmacs(self.after)

    def _gmacs(self, sizes: Sequence[int]) -> float:
        return sum(cost * size for cost, size in zip(self.costs, sizes, strict=True)) / 1e9


@dataclass
class ConversionReport:
    """The report of a conversion, which prints as a table.

    Attributes:
        blocks (list[BlockReport]): The converted blocks, in the order of the forward pass.
        skipped (dict[str, str]): Names of the blocks that stay as they are, with the reasons.
        differences (list[float]): For each tensor that ``forward`` returns, its mean square change
            on the held-out batches, relative to its variance.
    """

    blocks: list[BlockReport] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    differences: list[float] = field(default_factory=list)

    @property
    def sizes(self) -> Sizes:
        """New sizes of the parts with new weights, by name: those that a config must have."""
        return {block.name: block.after for block in self.blocks if block.changed}

    @property
    def gmacs(self) -> float:
        """The sum of those of all blocks."""
        return sum(block.gmacs for block in self.blocks)

    @property
    def narrow_gmacs(self) -> float:
        """The sum of those of all blocks."""
        return sum(block.narrow_gmacs for block in self.blocks)

    @property
    def fraction(self) -> float:
        """Fraction of the multiply-adds of these blocks that is left."""
        return self.narrow_gmacs / self.gmacs

    def __str__(self) -> str:
        rows = [('block', 'width', 'of', 'unexplained', 'GMACs', 'before')]
        for b in self.blocks:
            after, before = ('+'.join(map(str, sizes)) for sizes in (b.after, b.before))
            numbers = f'{b.unexplained:.4f}', f'{b.narrow_gmacs:.3f}', f'{b.gmacs:.3f}'
            rows.append((b.name, after, before, *numbers))
        rows.append(('all', '', '', '', f'{self.narrow_gmacs:.3f}', f'{self.gmacs:.3f}'))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ['  '.join(map(str.ljust, row, widths)).rstrip() for row in rows]
        if self.differences:
            shares = percent(self.differences)
            lines.append(f'on held-out images the outputs differ by {shares} of their variance')
        lines += [
            f'warning: {b.name}: the output of {b.constant_heads} heads is nearly constant on '
            'these images: give others'
            for b in self.blocks
            if b.constant_heads
        ]
        return '\n'.join(lines + [f'not converted: {k}: {why}' for k, why in self.skipped.items()])
