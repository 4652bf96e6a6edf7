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
from .ffn import ChannelIdleFFN, MergedFFN, num_active_channels
from .forms import CheckpointError, DeployForm, Form, TrainingForm, become, outermost
from .model import innermost, reparameterize, set_training_path, unwrap
from .numerics import check_finite
from .schedule import Scheduled, finish_schedules, set_lam
from .state import check_state_dict, has_deploy_form, has_training_form, is_reparameterized

__all__ = [
    'ChannelIdleFFN', 'CheckpointError', 'DeployForm', 'Form', 'JoinedLinear', 'MergedFFN',
    'OrdinaryAttention', 'OrdinaryFFN', 'ParallelAttention', 'ParallelFFN', 'ParallelIdleFFN',
    'Scheduled', 'TrainingForm', 'become', 'calibrate_batch_norm', 'check_finite',
    'check_state_dict', 'finish_schedules', 'has_deploy_form', 'has_training_form', 'innermost',
    'is_reparameterized', 'join_branches', 'num_active_channels', 'outermost', 'reparameterize',
    'set_lam', 'set_training_path', 'unwrap',
]  # fmt: skip
