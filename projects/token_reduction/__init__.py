"""Trained models that compute in full where much happens in an image, and less elsewhere."""

from projects.token_reduction.structure import ReduceTokens
from projects.token_reduction.tokens import (
    ReducedSwinBlock,
    ReducedViTLayer,
    reduce_tokens,
    reduce_tokens_,
)

__all__ = ['ReduceTokens', 'ReducedSwinBlock', 'ReducedViTLayer', 'reduce_tokens', 'reduce_tokens_']
