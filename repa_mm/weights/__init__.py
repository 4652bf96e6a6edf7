"""Checkpoints: reading them, fitting them to models, writing them. Nothing else opens one."""

from repa_mm.weights.fitting import (
    check_known,
    check_resumable,
    check_values,
    load_weights,
    match_form,
)
from repa_mm.weights.reading import (
    HOW_TO_GET_WEIGHTS,
    check_pretrained,
    find_latest,
    is_remote,
    load_anywhere,
    load_checkpoint,
    load_safely,
    without_wrappers,
)
from repa_mm.weights.unpickling import load_tensors
from repa_mm.weights.writing import save_checkpoint

__all__ = [
    'HOW_TO_GET_WEIGHTS', 'check_known', 'check_pretrained', 'check_resumable', 'check_values',
    'find_latest', 'is_remote', 'load_anywhere', 'load_checkpoint', 'load_safely', 'load_tensors',
    'load_weights', 'match_form', 'save_checkpoint', 'without_wrappers',
]  # fmt: skip
