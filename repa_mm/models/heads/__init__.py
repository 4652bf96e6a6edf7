"""Registered heads."""

from importlib.util import find_spec

__all__ = []

if find_spec('mmseg'):
    from repa_mm.models.heads.uper_head import FastUPerHead  # noqa: F401

    __all__ += ['FastUPerHead']
