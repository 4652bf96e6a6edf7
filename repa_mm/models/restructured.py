"""Backbones with other structures: experts, affine mixers."""

from mmengine.registry import MODELS
from mmpretrain.models import RIFormer, VisionTransformer

from repa_mm.models.builder import Restructured


@MODELS.register_module()
class ExpertsVisionTransformer(Restructured, VisionTransformer):
    """Vision Transformer whose FFNs are experts, which merge into their mean.

    `Experts Weights Averaging <https://arxiv.org/abs/2308.06093>`_: see
    :mod:`repa_mm.reparam.experts`. Merged, it has, name by name, the weights of mmpretrain's
    ``VisionTransformer``, with the layer scale of the FFNs in their matrices. The weights of an
    ordinary ViT, given as ``init_cfg``, fill every expert.

    Args:
        *args: Those of mmpretrain's ``VisionTransformer``.
        num_experts (int): Number of experts of each FFN. Defaults to 4.
        **kwargs: Those of the parent, and of :class:`~repa_mm.models.builder.Restructured`.
    """

    def __init__(self, *args, num_experts: int = 4, **kwargs) -> None:
        structures = [dict(type='Experts', num_experts=num_experts)]
        super().__init__(*args, structures=structures, **kwargs)


@MODELS.register_module()
class AffineRIFormer(Restructured, RIFormer):
    """RIFormer with affine maps in place of token mixers, which merge into the norms.

    `RIFormer <https://arxiv.org/abs/2304.05659>`_: see :mod:`repa_mm.reparam.mixer`. Merged, it
    has, name by name, the weights of mmpretrain's ``RIFormer`` with ``deploy=True``. The weights of
    mmpretrain's training form, and those of a PoolFormer, which has no affine maps, fill it.

    Args:
        *args, **kwargs: Those of mmpretrain's ``RIFormer``, and of
            :class:`~repa_mm.models.builder.Restructured`.

    Raises:
        ValueError: If the norms are no GroupNorms.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, structures=[dict(type='AffineMixers')], **kwargs)
