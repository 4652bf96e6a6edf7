"""Narrowing the FFNs and heads of pretrained models."""

from repa_mm.convert.conversion import convert_pretrained

__all__ = ['convert_pretrained']
