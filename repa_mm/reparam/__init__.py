"""Structural reparameterization in plain PyTorch."""

from .depth import (
    JoinedLinear,
    OrdinaryAttention,
    OrdinaryFFN,
    ParallelAttention,
    ParallelFFN,
    join_branches,
)
from .ffn import (
    ChannelIdleFFN,
    DropPath,
    FoldedFFN,
    MergedFFN,
    build_activation,
    fold,
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
from .model import (
    has_deploy_form,
    has_training_form,
    innermost,
    is_reparameterized,
    reparameterize,
    unwrap,
)
from .norms import AffineMap, MergedLinear, NormedLinear, ProgressiveNorm, RepBN
from .numerics import (
    batch_norm_affine,
    check_dropouts,
    check_finite,
    double,
    exact,
    is_plain,
    rounded,
)
from .parts import AttentionParts, FFNParts, NormParts, copy_affine, copy_matrix, fold_norm, matrix
from .schedule import Scheduled, finish_schedules, schedules_have_ended, set_lam

__all__ = [
    'AffineMap', 'AttentionParts', 'ChannelIdleFFN', 'CheckpointError', 'DeployForm', 'DropPath',
    'FFNParts', 'FoldedFFN', 'Form', 'JoinedLinear', 'MergedFFN', 'MergedLinear', 'NormParts',
    'NormedLinear', 'OrdinaryAttention', 'OrdinaryFFN', 'ParallelAttention', 'ParallelFFN',
    'ProgressiveNorm', 'RepBN', 'Scheduled', 'TrainingForm', 'batch_norm_affine', 'become',
    'build_activation', 'calibrate_batch_norm', 'check_dropouts', 'check_finite', 'check_ordinary',
    'check_state_dict', 'copy_affine', 'copy_matrix', 'double', 'exact', 'finish_schedules', 'fold',
    'fold_norm', 'has_deploy_form', 'has_training_form', 'innermost', 'is_plain',
    'is_reparameterized', 'join_branches', 'matrix', 'num_active_channels', 'outermost',
    'reparameterize', 'rounded', 'schedules_have_ended', 'set_lam', 'set_shortcut',
    'set_training_path', 'unwrap',
]  # fmt: skip
