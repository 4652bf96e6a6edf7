"""ViTs and Swins with progressive norms."""

from mmengine.registry import MODELS
from mmpretrain.models import SwinTransformer, VisionTransformer

from repa_mm.models import WithStructures


class ProgressiveBackbone(WithStructures):
    """Mixin before the mmpretrain parent of a backbone with progressive norms.

    `SLAB <https://arxiv.org/abs/2405.11582>`_: see :mod:`projects.slab.norms`. With the weights
    of the ordinary backbone, given as ``init_cfg``, and lambda = 1, it computes what that does.

    Args:
        *args: Those of the parent.
        bn_cfg (dict): The norm that merges, 'BN' or 'SyncBN'. Defaults to ``dict(type='BN')``.
        **kwargs: Those of the parent, and of :class:`~repa_mm.models.WithStructures`.
    """

    def __init__(self, *args, bn_cfg: dict = dict(type='BN'), **kwargs) -> None:
        structures = [dict(type='ProgressiveNorms', norm_cfg=bn_cfg)]
        super().__init__(*args, structures=structures, **kwargs)


@MODELS.register_module()
class ProgressiveVisionTransformer(ProgressiveBackbone, VisionTransformer):
    """Vision Transformer with progressive norms, which merge into attention and FFNs.

    Merged, the blocks have no norm left.

    Args:
        *args, **kwargs: Those of mmpretrain's ``VisionTransformer``, and of
            :class:`ProgressiveBackbone`.

    Examples:
        >>> model = ProgressiveVisionTransformer('deit-tiny')
        >>> ...  # train, with ScheduleHook
        >>> deployed = repa_mm.reparameterize(model)
    """


@MODELS.register_module()
class ProgressiveSwinTransformer(ProgressiveBackbone, SwinTransformer):
    """Swin Transformer with progressive norms, which merge into attention and FFNs.

    Merged, the blocks have no norm left; those of patch embedding, patch merging and outputs are
    LayerNorms.

    Args:
        *args, **kwargs: Those of mmpretrain's ``SwinTransformer``, and of
            :class:`ProgressiveBackbone`.

    Examples:
        >>> model = ProgressiveSwinTransformer('tiny', out_indices=(0, 1, 2, 3))
        >>> ...  # train, with ScheduleHook
        >>> deployed = repa_mm.reparameterize(model)
    """
