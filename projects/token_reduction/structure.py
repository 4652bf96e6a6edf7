"""Fewer tokens by a line of a config."""

from collections.abc import Sequence

import torch.nn as nn

from projects.token_reduction.tokens import reduce_tokens_
from repa_mm.models import STRUCTURES, Site, Structure


@STRUCTURES.register_module()
class ReduceTokens(Structure):
    """Blocks that compute their updates for fewer tokens in eval mode. There is no form.

    It comes last in a list of structures, since reduced blocks have no sites.

    Args:
        keep (float | Sequence[float]): As for :func:`reduce_tokens_`. Defaults to 0.7.
    """

    def __init__(self, keep: float | Sequence[float] = 0.7) -> None:
        self.keep = keep

    def sites(self, model: nn.Module) -> list[Site]:
        return []

    def put_(self, model: nn.Module) -> dict[str, str]:
        reduce_tokens_(model, self.keep)
        return {}
