"""Narrower FFNs for pretrained models."""

from repa_mm.fit.conversion import convert_pretrained
from repa_mm.fit.distillation import build_distiller

__all__ = ['build_distiller', 'convert_pretrained']
