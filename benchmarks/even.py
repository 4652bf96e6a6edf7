"""Sizes of narrower parts that are the same fractions in all blocks, as published methods have."""

from types import SimpleNamespace

from mmengine.config import Config

from repa_mm.apis import open_model
from repa_mm.convert.changed_config import converted_config
from repa_mm.convert.conversion import Conversion, find_parts
from repa_mm.faster import rewrite_


def even_sizes(
    conversion: Conversion, ffn: float = 1.0, qk: float = 1.0, v: float = 1.0
) -> dict[str, tuple[int, ...]]:
    """Choose sizes that are the same fractions in all blocks.

    Args:
        conversion (Conversion): The conversion, which has the parts.
        ffn (float): Fraction of the channels of FFNs, in (0, 1]. Defaults to 1.
        qk (float): Fraction of a head's dimensions of queries and keys, rounded to a multiple of 4.
            Defaults to 1.
        v (float): The same for values.
    """
    return {
        name: (max(1, round(ffn * part.sizes[0])),)
        if len(part.sizes) == 1
        else tuple(
            d if fraction == 1 else min(d, max(4, 4 * round(fraction * d / 4)))
            for fraction, d in zip((qk, v), part.sizes)
        )
        for name, part in conversion.parts.items()
    }


def even_config(cfg: Config, *fractions: float) -> Config:
    """Return the config of a narrower model, see :func:`even_sizes`; weights do not matter."""
    model = open_model(cfg)
    parts, _ = find_parts(model)
    sizes = even_sizes(SimpleNamespace(parts=parts), *fractions)
    return converted_config(cfg, model, sizes, rewritten=rewrite_(model, 'train'))
