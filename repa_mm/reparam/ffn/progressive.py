"""A channel-idle FFN whose idle channels lose their activation while they train.

As `VanillaNet <https://arxiv.org/abs/2305.12972>`_ does with all activations of a network: an idle
channel h starts with its activation and ends as an affine function of itself,

    lambda act(h) + (1 - lambda) (a h + c),    lambda from 1 to 0,

with a and c trained. A pretrained FFN can so begin as what it is.
"""

import torch
import torch.nn as nn

from ..autograd import kept_statistics
from ..numerics import check_linear, in_double
from ..schedule import Scheduled, set_lam
from .idle import ChannelIdleFFN
from .layers import check_input
from .weights import FoldedFFN


class _AffineRows(nn.Linear):
    """A linear layer, the last outputs h of which become a h + c: a linear layer again."""

    def __init__(self, linear: nn.Linear, num_idle: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.linear = linear
        self.slope = nn.Parameter(linear.weight.new_ones(num_idle))
        self.offset = nn.Parameter(linear.weight.new_zeros(num_idle))

    def _split(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tensor.tensor_split([self.out_features - len(self.slope)])

    @property
    def weight(self) -> torch.Tensor:
        active, idle = self._split(self.linear.weight)
        return torch.cat([active, self.slope[:, None] * idle])

    @property
    def bias(self) -> torch.Tensor:
        active, idle = self._split(self.linear.bias)
        return torch.cat([active, self.slope * idle + self.offset])


class ProgressiveIdleFFN(Scheduled, ChannelIdleFFN):
    """A :class:`ChannelIdleFFN` whose idle channels pass an activation that fades.

    At lambda = 0 it is a channel-idle FFN, in training too (see
    :mod:`repa_mm.reparam.ffn.folded`), and merges.

    Args:
        *args, **kwargs: Those of :class:`ChannelIdleFFN`.
    """

    end = 0.0
    scalar = 'activation'
    unfinished = 'the activations of idle channels have the weight'

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.add_activations()

    def add_activations(self) -> None:
        """Let idle channels start with an activation: what a channel-idle FFN lacks of this one."""
        self.fc1 = _AffineRows(self.fc1, self.num_idle)
        self._add_lam()
        self.lam = self.lam.to(self.fc1.slope.device)

    def forward(self, x: torch.Tensor, identity: torch.Tensor | None = None) -> torch.Tensor:
        """As :meth:`ChannelIdleFFN.forward`."""
        if self.is_finished:
            return super().forward(x, identity)
        check_input(self, x, identity)
        with kept_statistics(self.norm1, self.norm2):
            return self.forward_literal(x)

    def _hidden(self, u: torch.Tensor) -> torch.Tensor:
        """With idle channels on their way to an affine function."""
        if self.is_finished:
            return super()._hidden(u)
        active, h = self.fc1.linear(u).tensor_split([self.num_active], dim=1)
        lam, slope, offset = (t.to(h.dtype) for t in (self.lam, self.fc1.slope, self.fc1.offset))
        idle = lam * self.act(h) + (1 - lam) * (slope * h + offset)
        return torch.cat([self.act(active), idle], dim=1)

    def fold(self) -> FoldedFFN:
        """As :meth:`ChannelIdleFFN.fold`.

        Raises:
            ValueError: As there; or if lambda is not 0.
        """
        self.check_finished()
        check_linear(self.fc1.linear, 'its fc1')
        # In float64 the affine rows are not rounded before they are folded.
        return super(ProgressiveIdleFFN, in_double(self)).fold()

    def merge(self):
        """As :meth:`ChannelIdleFFN.merge`.

        Raises:
            ValueError: As there; or if lambda is not 0.
        """
        return super().merge()


def decay_activations(model: nn.Module, lam: float) -> nn.Module:
    """Set the weight lambda of the activations of a model's idle channels, in place.

    Args:
        model (nn.Module): A model with progressive channel-idle FFNs.
        lam (float): Lambda in [0, 1]: 1 for activated channels, 0 for FFNs that merge.

    Returns:
        nn.Module: The same model.

    Raises:
        ValueError: If lambda is not a number in [0, 1], or the model has no such FFN.
    """
    return set_lam(model, lam, ProgressiveIdleFFN, 'progressive channel-idle FFNs')
