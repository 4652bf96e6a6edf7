"""Registered heads."""

from importlib.util import find_spec

from repa_mm.models.heads.token_label import TokenLabelHead

__all__ = ['TokenLabelHead']

if find_spec('mmseg'):
    from repa_mm.models.heads.uper_head import FastUPerHead  # noqa: F401

    __all__ += ['FastUPerHead']
