"""Structural reparameterization in plain PyTorch."""

from .autograd import kept_statistics
from .folded import set_training_path_
from .forms import (
    CheckpointError,
    DeployForm,
    Form,
    Scheduled,
    TrainingForm,
    become_,
    check_ordinary,
    check_state_dict,
    outermost,
)
from .idle import ChannelIdleFFN
from .merged import (
    DropPath,
    FoldedFFN,
    MergedFFN,
    build_activation,
    build_norm,
    fold,
    num_active_channels,
    set_shortcut_,
)
from .model import (
    finish_schedules_,
    has_deploy_form,
    has_training_form,
    innermost,
    is_reparameterized,
    match_form,
    reparameterize,
    reparameterize_,
    replace_,
    schedules_have_ended,
    set_lam_,
    unwrap,
)
from .numerics import (
    AttentionParts,
    FFNParts,
    batch_norm_affine,
    check_dropouts,
    check_finite,
    copy_affine_,
    copy_matrix_,
    double,
    exact,
    fold_norm,
    is_batch_norm,
    is_plain,
    matrix,
    rounded,
)

__all__ = [
    'AttentionParts', 'ChannelIdleFFN', 'CheckpointError', 'DeployForm', 'DropPath', 'FFNParts',
    'FoldedFFN', 'Form', 'MergedFFN', 'Scheduled', 'TrainingForm', 'batch_norm_affine', 'become_',
    'build_activation', 'build_norm', 'check_dropouts', 'check_finite', 'check_ordinary',
    'check_state_dict', 'copy_affine_', 'copy_matrix_', 'double', 'exact', 'finish_schedules_',
    'fold', 'fold_norm', 'has_deploy_form', 'has_training_form', 'innermost', 'is_batch_norm',
    'is_plain', 'is_reparameterized', 'kept_statistics', 'match_form', 'matrix',
    'num_active_channels', 'outermost', 'reparameterize', 'reparameterize_', 'replace_', 'rounded',
    'schedules_have_ended', 'set_lam_', 'set_shortcut_', 'set_training_path_', 'unwrap',
]  # fmt: skip
