"""What MMEngine's Runner calls."""

from repa_mm.engine.dino import DINOHook
from repa_mm.engine.experts import AverageExpertsHook
from repa_mm.engine.imitation import ImitateMixersHook
from repa_mm.engine.metrics import DumpSegResults
from repa_mm.engine.optimizers import RelativeAdamW
from repa_mm.engine.reparameterize import ReparameterizeHook
from repa_mm.engine.safe_checkpoint import SafeCheckpointHook
from repa_mm.engine.schedules import (
    DecayActivationsHook,
    DecayLayerNormsHook,
    JoinBranchesHook,
    ScheduleHook,
)

__all__ = [
    'AverageExpertsHook',
    'DecayActivationsHook',
    'DecayLayerNormsHook',
    'DINOHook',
    'DumpSegResults',
    'ImitateMixersHook',
    'JoinBranchesHook',
    'RelativeAdamW',
    'ReparameterizeHook',
    'SafeCheckpointHook',
    'ScheduleHook',
]
