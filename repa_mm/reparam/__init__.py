"""Structural reparameterization in plain PyTorch."""

from .depth import (
    JoinedLinear,
    OrdinaryAttention,
    OrdinaryFFN,
    ParallelAttention,
    ParallelFFN,
    join_branches,
)
from .experts import ExpertLinear, ExpertsFFN, average_experts
from .ffn import (
    ChannelIdleFFN,
    LinearPathFFN,
    MergedFFN,
    num_active_channels,
    set_shortcut,
    set_training_path,
)
from .forms import (
    CheckpointError,
    DeployForm,
    Form,
    TrainingForm,
    become,
    check_ordinary,
    check_state_dict,
    outermost,
)
from .mixer import MergedNorm, NormedAffine
from .model import (
    has_deploy_form,
    has_training_form,
    innermost,
    is_reparameterized,
    reparameterize,
    unwrap,
)
from .norms import AffineMap, MergedLinear, NormedLinear, ProgressiveNorm, RepBN
from .numerics import check_finite
from .parts import AttentionParts, FFNParts, MixerParts, NormParts
from .schedule import Scheduled, finish_schedules, schedules_have_ended, set_lam

__all__ = [
    'AffineMap', 'AttentionParts', 'ChannelIdleFFN', 'CheckpointError', 'DeployForm',
    'ExpertLinear', 'ExpertsFFN', 'FFNParts', 'Form', 'JoinedLinear', 'LinearPathFFN', 'MergedFFN',
    'MergedLinear', 'MergedNorm', 'MixerParts', 'NormParts', 'NormedAffine', 'NormedLinear',
    'OrdinaryAttention', 'OrdinaryFFN', 'ParallelAttention', 'ParallelFFN', 'ProgressiveNorm',
    'RepBN', 'Scheduled', 'TrainingForm', 'average_experts', 'become', 'calibrate_batch_norm',
    'check_finite', 'check_ordinary', 'check_state_dict', 'finish_schedules', 'has_deploy_form',
    'has_training_form', 'innermost', 'is_reparameterized', 'join_branches', 'num_active_channels',
    'outermost', 'reparameterize', 'schedules_have_ended', 'set_lam', 'set_shortcut',
    'set_training_path', 'unwrap',
]  # fmt: skip
