"""Experts Weights Averaging: FFNs in several copies, which merge into their mean."""

from projects.expert_averaging.experts import (
    ExpertLinear,
    ExpertsFFN,
    MergedExperts,
    average_experts,
)
from projects.expert_averaging.hook import AverageExpertsHook
from projects.expert_averaging.structure import Experts, ExpertsVisionTransformer

__all__ = [
    'AverageExpertsHook', 'ExpertLinear', 'Experts', 'ExpertsFFN', 'ExpertsVisionTransformer',
    'MergedExperts', 'average_experts',
]  # fmt: skip
