"""Window attention with a progressive norm before its first linear layer."""

from collections.abc import Sequence

import torch

from projects.slab.norms import MergedLinear, NormedLinear
from repa_mm.faster import FastShiftWindowMSA, is_traced


class NormedShiftWindowMSA(FastShiftWindowMSA):
    """A window attention whose norm is in ``w_msa.qkv``, in either form.

    A map is padded behind the norm, with zeros that are not normalized.
    """

    def forward(self, query: torch.Tensor, hw_shape: Sequence[int]) -> torch.Tensor:
        """As :class:`~repa_mm.faster.FastShiftWindowMSA`, for tokens that are not normalized."""
        layer = self.w_msa.qkv
        if isinstance(layer, NormedLinear):
            query = layer.norm(query)
        return super().forward(query, hw_shape)

    def qkv(self, windows: torch.Tensor, padded: torch.Tensor | None) -> torch.Tensor:
        layer = self.w_msa.qkv
        if isinstance(layer, NormedLinear):  # whose norm comes before the padding
            return layer.linear(windows)
        qkv = layer(windows)
        if padded is None or not isinstance(layer, MergedLinear):
            return qkv
        # What is padding behind the norm is none before it.
        rows = qkv.view(-1, padded.shape[0], qkv.shape[-1])
        padding = layer.padding.to(qkv.dtype)
        # Inductor of torch 2.1 fails on selections whose condition it can compute.
        if is_traced():
            rows = rows * ~padded + padding * padded
        else:
            rows = torch.where(padded, padding, rows)
        return rows.view(qkv.shape)
