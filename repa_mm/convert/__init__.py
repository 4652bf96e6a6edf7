"""Narrowing the FFNs and heads of pretrained models."""

from repa_mm.convert.conversion import convert_pretrained
from repa_mm.convert.training_form import fit_channel_idle

__all__ = ['convert_pretrained', 'fit_channel_idle']
