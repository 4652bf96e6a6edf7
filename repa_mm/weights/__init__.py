"""Checkpoints: reading them, fitting them to models, writing them."""

from repa_mm.weights import fitting
from repa_mm.weights.checkpoint import load_checkpoint, match_form, save_checkpoint
from repa_mm.weights.checkpoint import load_weights as _load_weights
from repa_mm.weights.fitting import check_known, check_resumable, check_values
from repa_mm.weights.reading import (
    HOW_TO_GET_WEIGHTS,
    check_pretrained,
    find_latest,
    is_remote,
    load_anywhere,
    load_safely,
    without_wrappers,
)
from repa_mm.weights.unpickling import load_tensors

__all__ = [
    'HOW_TO_GET_WEIGHTS', 'check_known', 'check_pretrained', 'check_resumable', 'check_values',
    'find_latest', 'is_remote', 'load_anywhere', 'load_checkpoint', 'load_safely', 'load_tensors',
    'load_weights', 'match_form', 'save_checkpoint', 'without_wrappers',
]  # fmt: skip


def load_weights(model, state_dict, path=None, **kwargs):
    (fitting if kwargs else _Own).load_weights(model, state_dict, path, **kwargs)


class _Own:
    load_weights = staticmethod(_load_weights)
