"""DINO: self-supervised pretraining of vision transformers."""

from projects.dino.hook import DINOHook
from projects.dino.model import DINO, ClassTokens, DINOHead, DINOProjection

__all__ = ['DINO', 'ClassTokens', 'DINOHead', 'DINOHook', 'DINOProjection']
