"""Structural reparameterization in plain PyTorch."""

from .deploy_form import (
    DropPath,
    FoldedFFN,
    MergedFFN,
    build_activation,
    build_norm,
    fold,
    num_active_channels,
    set_shortcut_,
)
from .folded import set_training_path_
from .forms import (
    CheckpointError,
    DeployForm,
    Form,
    TrainingForm,
    check_ordinary,
    check_state_dict,
    outermost,
)
from .idle import ChannelIdleFFN
from .model import (
    finish_schedules_,
    has_deploy_form,
    has_training_form,
    is_reparameterized,
    match_form,
    reparameterize,
    reparameterize_,
    schedules_have_ended,
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
    fold_norm,
    is_batch_norm,
    rounded,
    weight_and_bias,
)

__all__ = [
    'AttentionParts', 'ChannelIdleFFN', 'CheckpointError', 'DeployForm', 'DropPath', 'FFNParts',
    'FoldedFFN', 'Form', 'MergedFFN', 'TrainingForm', 'batch_norm_affine', 'build_activation',
    'build_norm', 'check_dropouts', 'check_finite', 'check_ordinary', 'check_state_dict',
    'copy_affine_', 'copy_matrix_', 'double', 'finish_schedules_', 'fold', 'fold_norm',
    'has_deploy_form', 'has_training_form', 'is_batch_norm', 'is_reparameterized', 'match_form',
    'num_active_channels', 'outermost', 'reparameterize', 'reparameterize_', 'rounded',
    'schedules_have_ended', 'set_shortcut_', 'set_training_path_', 'weight_and_bias',
]  # fmt: skip
