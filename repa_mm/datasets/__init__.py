"""Data sets and transforms."""

from repa_mm.datasets.folder import ImageFolder
from repa_mm.datasets.label_maps import LoadTokenLabels, RandomResizedCropWithBox

__all__ = ['ImageFolder', 'LoadTokenLabels', 'RandomResizedCropWithBox']
