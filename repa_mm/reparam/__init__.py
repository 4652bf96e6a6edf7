"""Structural reparameterization in plain PyTorch."""

from .calibrate import calibrate_batch_norm
from .ffn import ChannelIdleFFN, MergedFFN, num_active_channels
from .forms import CheckpointError, DeployForm, Form, TrainingForm, become, outermost
from .model import innermost, reparameterize, set_training_path, unwrap
from .numerics import check_finite
from .state import check_state_dict, has_deploy_form, has_training_form, is_reparameterized

__all__ = [
    'ChannelIdleFFN', 'CheckpointError', 'DeployForm', 'Form', 'MergedFFN', 'TrainingForm',
    'become', 'calibrate_batch_norm', 'check_finite', 'check_state_dict', 'has_deploy_form',
    'has_training_form', 'innermost', 'is_reparameterized', 'num_active_channels', 'outermost',
    'reparameterize', 'set_training_path', 'unwrap',
]  # fmt: skip
