"""Hooks for MMEngine's Runner."""

from repa_mm.engine.reparameterize import ReparameterizeHook
from repa_mm.engine.schedules import ScheduleHook

__all__ = ['ReparameterizeHook', 'ScheduleHook']
