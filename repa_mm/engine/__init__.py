"""Hooks for MMEngine's Runner."""

from repa_mm.engine.reparameterize import ReparameterizeHook

__all__ = ['ReparameterizeHook']
