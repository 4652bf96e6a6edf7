"""Structural reparameterization in plain PyTorch."""

from .autograd import kept_statistics
from .ffn import (
    ChannelIdleFFN,
    DropPath,
    FoldedFFN,
    MergedFFN,
    build_activation,
    build_norm,
    fold,
    num_active_channels,
    set_shortcut_,
    set_training_path_,
)
from .forms import (
    CheckpointError,
    DeployForm,
    Form,
    TrainingForm,
    become_,
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
    reparameterize_,
    unwrap,
)
from .numerics import (
    batch_norm_affine,
    check_dropouts,
    check_finite,
    double,
    exact,
    is_batch_norm,
    is_plain,
    rounded,
)
from .parts import AttentionParts, FFNParts, copy_affine_, copy_matrix_, fold_norm, matrix
from .schedule import Scheduled, finish_schedules_, schedules_have_ended, set_lam_

__all__ = [
    'AttentionParts', 'ChannelIdleFFN', 'CheckpointError', 'DeployForm', 'DropPath', 'FFNParts',
    'FoldedFFN', 'Form', 'MergedFFN', 'Scheduled', 'TrainingForm', 'batch_norm_affine', 'become_',
    'build_activation', 'build_norm', 'check_dropouts', 'check_finite', 'check_ordinary',
    'check_state_dict', 'copy_affine_', 'copy_matrix_', 'double', 'exact', 'finish_schedules_',
    'fold', 'fold_norm', 'has_deploy_form', 'has_training_form', 'innermost', 'is_batch_norm',
    'is_plain', 'is_reparameterized', 'kept_statistics', 'matrix', 'num_active_channels',
    'outermost', 'reparameterize', 'reparameterize_', 'rounded', 'schedules_have_ended', 'set_lam_',
    'set_shortcut_', 'set_training_path_', 'unwrap',
]  # fmt: skip
