"""What the tools do with a config and a checkpoint."""

from repa_mm.run.config import (
    FORMS,
    build_model,
    codebase_tool,
    dataset_config,
    load_config,
    take_no_pretrained,
)
from repa_mm.run.data import check_data
from repa_mm.run.inference import draw_predictions, init_any_model, init_model
from repa_mm.run.knn import knn_evaluate, knn_predict
from repa_mm.run.merging import calibrate_checkpoint, reparameterize_checkpoint
from repa_mm.run.runners import end_process, runner_for_testing, runner_for_training

__all__ = [
    'FORMS',
    'build_model',
    'calibrate_checkpoint',
    'check_data',
    'codebase_tool',
    'dataset_config',
    'draw_predictions',
    'end_process',
    'init_any_model',
    'init_model',
    'knn_evaluate',
    'knn_predict',
    'load_config',
    'reparameterize_checkpoint',
    'runner_for_testing',
    'runner_for_training',
    'take_no_pretrained',
]
