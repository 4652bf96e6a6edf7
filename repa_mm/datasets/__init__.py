"""Data sets beyond those of OpenMMLab: ImageNet with token labels."""

from repa_mm.datasets.token_label import LoadTokenLabels, RandomResizedCropWithBox

__all__ = ['LoadTokenLabels', 'RandomResizedCropWithBox']
