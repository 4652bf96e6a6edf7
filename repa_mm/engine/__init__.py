"""What MMEngine's Runner calls."""

from repa_mm.engine.dino import DINOHook
from repa_mm.engine.metrics import DumpSegResults
from repa_mm.engine.reparameterize import ReparameterizeHook
from repa_mm.engine.safe_checkpoint import SafeCheckpointHook
from repa_mm.engine.schedules import JoinBranchesHook, ScheduleHook

__all__ = [
    'DINOHook',
    'DumpSegResults',
    'JoinBranchesHook',
    'ReparameterizeHook',
    'SafeCheckpointHook',
    'ScheduleHook',
]
