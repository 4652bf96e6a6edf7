"""Registered heads."""

from repa_mm.models.heads.token_label import TokenLabelHead

__all__ = ['TokenLabelHead']
