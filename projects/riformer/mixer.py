"""No token mixer: an affine map in its place, which merges into the norm before it.

`RIFormer <https://arxiv.org/abs/2304.05659>`_ takes the token mixers out of a PoolFormer. In
training, an affine map of each channel stands in the place of the mixer,

    y = (alpha u + c) - u    with u = gamma n(x) + beta, the norm before it,

which is a norm with scale (alpha - 1) gamma and shift (alpha - 1) beta + c.
"""

from typing import NamedTuple

import torch
import torch.nn as nn

from repa_mm.reparam import DeployForm, TrainingForm, copy_affine_, double, rounded
from repa_mm.surgery import has_stock_forward


class MixerParts(NamedTuple):
    """A norm, and the affine map (a convolution by channels) in the place of a token mixer."""

    norm: nn.Module
    affine: nn.Conv2d


class NormedAffine(TrainingForm):
    """A norm and the affine map that stands for a token mixer, which merge into one norm.

    Args:
        num_channels (int): Number of channels C.
        num_groups (int): Groups of the GroupNorm. Defaults to 1.
        eps (float): Epsilon of the GroupNorm. Defaults to 1e-5.
    """

    label = 'affine token mixer'

    def __init__(self, num_channels: int, num_groups: int = 1, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(num_groups, num_channels, eps)
        # As mmpretrain's, by channels.
        self.affine = nn.Conv2d(num_channels, num_channels, 1, groups=num_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What is added to a feature map x (B, C, H, W)."""
        u = self.norm(x)
        return self.affine(u) - u

    def fill(self, parts: MixerParts) -> None:
        """Take the weights of a norm and of the affine map behind it."""
        copy_affine_(self.norm, parts.norm)
        copy_affine_(self.affine, parts.affine)

    def merge(self) -> 'MergedNorm':
        """Compute the norm that both are, in float64.

        Raises:
            ValueError: As :meth:`TrainingForm.merge`; or if a part is not what it was built as.
        """
        norm, affine = self.norm, self.affine
        if not (has_stock_forward(norm, nn.GroupNorm) and has_stock_forward(affine, nn.Conv2d)):
            raise ValueError(
                f'its parts are a {type(norm).__name__} and a {type(affine).__name__}, and not a '
                'GroupNorm and a convolution'
            )
        with torch.device('meta'):
            merged = MergedNorm(norm.num_channels, norm.num_groups, norm.eps)
        scale = double(affine.weight).flatten() - 1
        merged.weight = rounded(scale * double(norm.weight), norm.weight)
        merged.bias = rounded(scale * double(norm.bias) + double(affine.bias), norm.weight)
        return merged


class MergedNorm(DeployForm):
    """A GroupNorm with an affine map in its weights.

    Args:
        num_channels (int): Number of channels C.
        num_groups (int): Groups. Defaults to 1.
        eps (float): Epsilon. Defaults to 1e-5.
    """

    label = 'affine token mixer'

    def __init__(self, num_channels: int, num_groups: int = 1, eps: float = 1e-5) -> None:
        super().__init__()
        self.num_groups, self.eps = num_groups, eps
        self.weight = nn.Parameter(torch.ones(num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels))

    def inference(self, x: torch.Tensor) -> torch.Tensor:
        """As :meth:`NormedAffine.forward`."""
        return nn.functional.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
