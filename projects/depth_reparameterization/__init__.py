"""Depth reparameterization: parallel branches that are joined in training and merge."""

from projects.depth_reparameterization.backbones import (
    ParallelMAEViT,
    ParallelSwinTransformer,
    ParallelVisionTransformer,
)
from projects.depth_reparameterization.branches import (
    JoinedLinear,
    OrdinaryAttention,
    OrdinaryFFN,
    ParallelAttention,
    ParallelFFN,
    join_branches,
)
from projects.depth_reparameterization.structure import Branches

__all__ = [
    'Branches', 'JoinedLinear', 'OrdinaryAttention', 'OrdinaryFFN', 'ParallelAttention',
    'ParallelFFN', 'ParallelMAEViT', 'ParallelSwinTransformer', 'ParallelVisionTransformer',
    'join_branches',
]  # fmt: skip
