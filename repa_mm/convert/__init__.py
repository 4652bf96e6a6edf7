"""Narrowing the FFNs of pretrained models."""

from repa_mm.convert.conversion import convert_pretrained
from repa_mm.convert.distillation import build_distiller

__all__ = ['build_distiller', 'convert_pretrained']
