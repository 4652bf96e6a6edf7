"""Data sets beyond those of OpenMMLab: ImageNet with token labels."""

from .token_label import LoadTokenLabels, RandomResizedCropWithBox

__all__ = ['LoadTokenLabels', 'RandomResizedCropWithBox']
