"""Conversions with the same fractions in all blocks."""

from functools import partial

from repa_mm.convert.budget import even_sizes
from repa_mm.convert.conversion import convert


def narrowed(model, batches, ffn=1.0, qk=1.0, v=1.0, **options):
    parts = ['heads'] * (min(qk, v) < 1) + ['ffn'] * (ffn < 1 or qk == v == 1)
    return convert(model, batches, partial(even_sizes, ffn=ffn, qk=qk, v=v), parts, **options)
