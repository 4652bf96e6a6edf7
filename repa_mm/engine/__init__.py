"""What MMEngine's Runner calls."""

from repa_mm.engine.optimizers import RelativeAdamW
from repa_mm.engine.reparameterize import ReparameterizeHook
from repa_mm.engine.schedules import ScheduleHook
from repa_mm.engine.self_distillation import DINOHook
from repa_mm.engine.structure_hooks import AverageExpertsHook, ImitateMixersHook

__all__ = [
    'AverageExpertsHook',
    'DINOHook',
    'ImitateMixersHook',
    'RelativeAdamW',
    'ReparameterizeHook',
    'ScheduleHook',
]
