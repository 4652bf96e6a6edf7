"""Checkpoints: reading, comparing with a model, and writing them."""

from repa_mm.checkpoints.fitting import (
    check_checkpoint,
    check_fit,
    check_fit_of,
    check_resumable,
    check_values,
)
from repa_mm.checkpoints.reading import (
    HOW_TO_GET_WEIGHTS,
    check_pretrained,
    check_size,
    find_latest,
    is_remote,
    load_checkpoint,
    load_from_local,
    load_safely,
)
from repa_mm.checkpoints.writing import save_checkpoint

__all__ = [
    'HOW_TO_GET_WEIGHTS',
    'check_checkpoint',
    'check_fit',
    'check_fit_of',
    'check_pretrained',
    'check_resumable',
    'check_size',
    'check_values',
    'find_latest',
    'is_remote',
    'load_checkpoint',
    'load_from_local',
    'load_safely',
    'save_checkpoint',
]
