"""Norms: LayerNorms that become BatchNorms while they train, and merge.

`SLAB <https://arxiv.org/abs/2405.11582>`_ replaces LayerNorm by RepBN(x) = BN(x) + eta x, and goes
from one to the other while it trains:

    norm(x) = lambda LN(x) + (1 - lambda) RepBN(x),    lambda from 1 to 0.

At lambda = 0 and with the statistics of inference that is s x + t. It merges into the linear layer
that follows, W (s x + t) + b = (W diag(s)) x + (W t + b), and is an affine map where none does.
"""

from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from projects.schedules import Scheduled
from repa_mm.reparam import (
    DeployForm,
    TrainingForm,
    batch_norm_affine,
    build_norm,
    copy_affine_,
    copy_matrix_,
    double,
    is_batch_norm,
    rounded,
    weight_and_bias,
)


class NormParts(NamedTuple):
    """A norm, and the linear layer that alone reads its output; None if there is no such layer."""

    norm: nn.Module
    linear: nn.Linear | None = None


class RepBN(nn.Module):
    """BN(x) + eta x on tokens, with eta a number that is trained.

    Args:
        num_features (int): Number of channels C.
        norm_cfg (dict): 'BN' or 'SyncBN', and its arguments. Defaults to ``dict(type='BN')``.

    Raises:
        ValueError: If ``norm_cfg`` is of another norm, or of one without running statistics.
    """

    def __init__(self, num_features: int, norm_cfg: dict = dict(type='BN')) -> None:
        super().__init__()
        self.bn = build_norm(norm_cfg, num_features)
        if getattr(self.bn, 'running_mean', None) is None:
            raise ValueError(
                f"RepBN takes 'BN' or 'SyncBN', with running statistics, but got {norm_cfg!r}"
            )
        self.eta = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalized tokens of shape (..., C)."""
        return self.bn(x.reshape(-1, x.shape[-1])).view(x.shape) + self.eta * x

    def affine(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return s and t, each (C, ) in float64, of the map s x + t of eval mode.

        Raises:
            ValueError: If the BatchNorm has no running statistics, or is something else.
        """
        if not is_batch_norm(self.bn):
            raise ValueError(f'its BatchNorm is a {type(self.bn).__name__}, which does not merge')
        eta = double(self.eta)
        s, t = batch_norm_affine(self.bn, eta.expand(1, self.bn.num_features))
        return s + eta, t


class ProgressiveNorm(Scheduled, TrainingForm):
    """lambda LN(x) + (1 - lambda) RepBN(x), which merges into an affine map at lambda = 0.

    Args:
        num_features (int): Number of channels C.
        norm_cfg (dict): Norm of the RepBN, 'BN' or 'SyncBN'. Defaults to ``dict(type='BN')``.
        eps (float): Epsilon of the LayerNorm. Defaults to 1e-5.
    """

    label = 'progressive norm'
    end = 0.0
    scalar = 'layer_norm'
    unfinished = 'the LayerNorms have the weight'

    def __init__(
        self, num_features: int, norm_cfg: dict = dict(type='BN'), eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(num_features, eps=eps)
        self.rep = RepBN(num_features, norm_cfg)
        self.add_lam()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalized tokens of shape (..., C)."""
        if not self.is_finished:
            lam = self.lam.to(x.dtype)
            return lam * self.ln(x) + (1 - lam) * self.rep(x)
        y = self.rep(x)
        if self.training:
            # Distributed training waits for a gradient of every parameter.
            y = y + 0 * (self.ln.weight.sum() + self.ln.bias.sum())
        return y

    def fill(self, parts: NormParts) -> None:
        """Take scale and shift of a LayerNorm: at lambda = 1 this module is that norm."""
        copy_affine_(self.ln, parts.norm)

    def affine(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return s and t at lambda = 0, as :meth:`RepBN.affine`.

        Raises:
            ValueError: If lambda is not 0, or as :meth:`RepBN.affine`.
        """
        self.check_finished()
        return self.rep.affine()

    def merge(self) -> 'AffineMap':
        """Compute the affine map that the norm is at lambda = 0, in float64.

        Raises:
            ValueError: As :meth:`TrainingForm.merge`; or if lambda is not 0.
        """
        s, t = self.affine()
        with torch.device('meta'):
            merged = AffineMap(len(s))
        like = self.rep.eta
        merged.scale, merged.shift = rounded(s, like), rounded(t, like)
        return merged


class AffineMap(DeployForm):
    """s x + t for every channel: a progressive norm that no linear layer follows.

    Its weights are not named as those of a LayerNorm, which would be taken for them.

    Args:
        num_features (int): Number of channels C.
    """

    label = 'progressive norm'

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(num_features))
        self.shift = nn.Parameter(torch.zeros(num_features))

    def inference(self, x: torch.Tensor) -> torch.Tensor:
        """As :meth:`ProgressiveNorm.forward`."""
        return torch.addcmul(self.shift, x, self.scale)


class NormedLinear(TrainingForm):
    """A progressive norm and the linear layer that follows it, which merge into one linear layer.

    Where zeros come between both, as around the maps of window attention, :attr:`norm` and
    :attr:`linear` are called one by one, see :class:`~projects.slab.NormedShiftWindowMSA`.

    Args:
        norm (ProgressiveNorm): The norm.
        linear (nn.Linear): The linear layer.
    """

    label = 'linear layer with a progressive norm'

    def __init__(self, norm: ProgressiveNorm, linear: nn.Linear) -> None:
        super().__init__()
        self.norm, self.linear = norm, linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The linear layer's outputs (..., out) for tokens (..., C)."""
        return self.linear(self.norm(x))

    def fill(self, parts: NormParts) -> None:
        """Take the weights of a LayerNorm and of the linear layer behind it."""
        self.norm.fill(parts)
        copy_matrix_(self.linear, *weight_and_bias(parts.linear))

    def merge(self) -> 'MergedLinear':
        """Compute the linear layer that both are at lambda = 0, in float64.

        Raises:
            ValueError: As :meth:`TrainingForm.merge`; if lambda is not 0, or the layer is no
                ``nn.Linear``.
        """
        linear = self.linear
        weight, own = weight_and_bias(linear, 'its linear layer')
        s, t = self.norm.affine()
        with torch.device('meta'):
            merged = MergedLinear(linear.in_features, linear.out_features)
        merged.weight = rounded(weight * s, linear.weight)
        merged.bias = rounded(weight @ t + own, linear.weight)
        merged.padding = own.to(linear.weight, copy=True)
        return merged


class MergedLinear(DeployForm):
    """A linear layer with the norm before it.

    Args:
        in_features (int): Number of inputs.
        out_features (int): Number of outputs.

    Attributes:
        padding (torch.Tensor): What a zero behind the norm becomes, the bias of the layer alone.
            Its name also tells these weights from those of an ordinary linear layer.
    """

    label = 'linear layer with a progressive norm'

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features))
        self.register_buffer('padding', torch.zeros(out_features))

    def inference(self, x: torch.Tensor) -> torch.Tensor:
        """As :meth:`NormedLinear.forward`."""
        return F.linear(x, self.weight, self.bias)
