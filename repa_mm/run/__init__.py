"""What the tools do with a config and a checkpoint."""

from repa_mm.run.config import build_model, codebase_tool, dataset_config, image_config, load_config
from repa_mm.run.merging import calibrate_checkpoint, reparameterize_checkpoint

__all__ = [
    'build_model',
    'calibrate_checkpoint',
    'codebase_tool',
    'dataset_config',
    'image_config',
    'load_config',
    'reparameterize_checkpoint',
]
