"""Narrowing the FFNs and heads of pretrained models."""

from repa_mm.convert.conversion import Conversion, convert_pretrained

__all__ = ['Conversion', 'convert_pretrained']
