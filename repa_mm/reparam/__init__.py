"""Channel-idle FFNs and their reparameterization, in plain PyTorch."""

from .calibrate import calibrate_batch_norm
from .ffn import (
    ChannelIdleFFN,
    CheckpointError,
    DeployForm,
    MergedFFN,
    TrainingForm,
    check_finite,
    num_active_channels,
)
from .model import (
    check_state_dict,
    has_deploy_form,
    is_reparameterized,
    reparameterize,
    set_training_path,
    unwrap,
)

__all__ = [
    'ChannelIdleFFN',
    'CheckpointError',
    'DeployForm',
    'MergedFFN',
    'TrainingForm',
    'calibrate_batch_norm',
    'check_finite',
    'check_state_dict',
    'has_deploy_form',
    'is_reparameterized',
    'num_active_channels',
    'reparameterize',
    'set_training_path',
    'unwrap',
]
