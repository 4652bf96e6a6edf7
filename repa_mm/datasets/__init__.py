"""Data sets."""

from repa_mm.datasets.folder import ImageFolder

__all__ = ['ImageFolder']
