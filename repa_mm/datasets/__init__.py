"""Data sets and transforms."""

from repa_mm.datasets.folder import ImageFolder
from repa_mm.datasets.token_label import LoadTokenLabels, RandomResizedCropWithBox

__all__ = ['ImageFolder', 'LoadTokenLabels', 'RandomResizedCropWithBox']
