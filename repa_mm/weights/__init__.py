"""Checkpoints: reading them, fitting them to models, writing and translating them."""

from repa_mm.weights.authors import translate, translate_file
from repa_mm.weights.checkpoint import (
    load_checkpoint,
    load_original,
    load_weights,
    match_form,
    save_checkpoint,
)

__all__ = [
    'load_checkpoint', 'load_original', 'load_weights', 'match_form', 'save_checkpoint',
    'translate', 'translate_file',
]  # fmt: skip
