"""LV-ViT and RePa-LV-ViT, and the token labels that they learn."""

from projects.lvvit.head import TokenLabelHead
from projects.lvvit.label_maps import LoadTokenLabels, RandomResizedCropWithBox
from projects.lvvit.model import LVViT, RePaLVViT

__all__ = ['LVViT', 'LoadTokenLabels', 'RandomResizedCropWithBox', 'RePaLVViT', 'TokenLabelHead']
