"""Conversions with the same fractions in all blocks."""

from benchmarks.even import even_sizes
from repa_mm.convert import Conversion


def narrowed(model, batches, ffn=1.0, qk=1.0, v=1.0, held_out=(), progress=None, **options):
    parts = ['heads'] * (min(qk, v) < 1) + ['ffn'] * (ffn < 1 or qk == v == 1)
    conversion = Conversion(model, batches, parts, **options)
    return conversion.fit(even_sizes(conversion, ffn, qk, v), held_out, progress)
