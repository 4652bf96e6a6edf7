"""Hooks and optimizers for MMEngine's Runner."""

from repa_mm.engine.optimizers import RelativeAdamW
from repa_mm.engine.reparameterize import ReparameterizeHook
from repa_mm.engine.schedules import ScheduleHook

__all__ = ['RelativeAdamW', 'ReparameterizeHook', 'ScheduleHook']
