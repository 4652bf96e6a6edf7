"""Structural reparameterization in plain PyTorch."""

from .calibrate import calibrate_batch_norm
from .depth import (
    JoinedLinear,
    OrdinaryAttention,
    OrdinaryFFN,
    ParallelAttention,
    ParallelFFN,
    ParallelIdleFFN,
    join_branches,
)
from .experts import ExpertLinear, ExpertsFFN, ExpertsIdleFFN, average_experts
from .ffn import ChannelIdleFFN, MergedFFN, num_active_channels
from .ffn.progressive import ProgressiveIdleFFN, decay_activations
from .forms import CheckpointError, DeployForm, Form, TrainingForm, become, outermost
from .mixer import MergedNorm, NormedAffine
from .model import innermost, reparameterize, set_training_path, unwrap
from .norms import AffineMap, MergedLinear, NormedLinear, ProgressiveNorm, RepBN, decay_layer_norms
from .numerics import check_finite
from .schedule import Scheduled, finish_schedules, schedules_have_ended, set_lam
from .state import check_state_dict, has_deploy_form, has_training_form, is_reparameterized

__all__ = [
    'AffineMap', 'ChannelIdleFFN', 'CheckpointError', 'DeployForm', 'ExpertLinear', 'ExpertsFFN',
    'ExpertsIdleFFN', 'Form', 'JoinedLinear', 'MergedFFN', 'MergedLinear', 'MergedNorm',
    'NormedAffine', 'NormedLinear', 'OrdinaryAttention', 'OrdinaryFFN', 'ParallelAttention',
    'ParallelFFN', 'ParallelIdleFFN', 'ProgressiveIdleFFN', 'ProgressiveNorm', 'RepBN', 'Scheduled',
    'TrainingForm', 'average_experts', 'become', 'calibrate_batch_norm', 'check_finite',
    'check_state_dict', 'decay_activations', 'decay_layer_norms', 'finish_schedules',
    'has_deploy_form', 'has_training_form', 'innermost', 'is_reparameterized', 'join_branches',
    'num_active_channels', 'outermost', 'reparameterize', 'schedules_have_ended', 'set_lam',
    'set_training_path', 'unwrap',
]  # fmt: skip
