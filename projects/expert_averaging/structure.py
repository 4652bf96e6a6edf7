"""Experts in models: the structure, and a backbone of that name."""

import copy

import torch.nn as nn
from mmengine.registry import MODELS
from mmpretrain.models import VisionTransformer

from projects.expert_averaging.experts import ExpertsFFN
from repa_mm.models import STRUCTURES, FFNSite, Structure, WithStructures, ffn_sites


@STRUCTURES.register_module()
class Experts(Structure):
    """FFNs of experts, see :class:`ExpertsFFN`. They begin with random weights.

    Args:
        num_experts (int): Number of experts E of each FFN. Defaults to 4.
    """

    def __init__(self, num_experts: int = 4) -> None:
        self.num_experts = num_experts

    def sites(self, model: nn.Module) -> list[FFNSite]:
        return [site for site in ffn_sites(model) if site.family.norm]

    def form(self, site: FFNSite) -> ExpertsFFN:
        parts = site.parts()
        hidden, channels = parts.fc1.weight.shape[:2]
        form = ExpertsFFN(
            channels,
            hidden,
            self.num_experts,
            copy.deepcopy(parts.act),
            drop_rate=parts.drop_rate,
            drop_path=parts.drop_path_rate,
        )
        if parts.scale is not None:
            form.layer_scale = nn.Parameter(parts.scale.detach().clone())
        return form


@MODELS.register_module()
class ExpertsVisionTransformer(WithStructures, VisionTransformer):
    """Vision Transformer whose FFNs are experts, which merge into their mean.

    `Experts Weights Averaging <https://arxiv.org/abs/2308.06093>`_. Merged, it has, name by name,
    the weights of mmpretrain's ``VisionTransformer``, with the layer scale of the FFNs in their
    matrices. The weights of an ordinary ViT, given as ``init_cfg``, fill every expert.

    Args:
        *args: Those of mmpretrain's ``VisionTransformer``.
        num_experts (int): Number of experts of each FFN. Defaults to 4.
        **kwargs: Those of the parent, and of :class:`~repa_mm.models.WithStructures`.
    """

    def __init__(self, *args, num_experts: int = 4, **kwargs) -> None:
        structures = [dict(type='Experts', num_experts=num_experts)]
        super().__init__(*args, structures=structures, **kwargs)
