"""ViT and Swin whose LayerNorms become BatchNorms while they train."""

from mmengine.registry import MODELS
from mmpretrain.models import SwinTransformer, VisionTransformer

from repa_mm.models.attention import swap_attention
from repa_mm.models.base import ReparamBackbone
from repa_mm.models.surgery.idle import idle_channels
from repa_mm.models.surgery.norms import progressive_activations as fade_activations
from repa_mm.models.surgery.norms import progressive_norms
from repa_mm.models.swin import SwinStateDicts


class ProgressiveBackbone(ReparamBackbone):
    """Mixin before the mmpretrain parent of a backbone with progressive norms.

    Weights of the ordinary backbone load: with them and lambda = 1, it computes what that does.

    Args:
        *args, **kwargs: Those of the parent.
        idle_ratio (float, optional): Make the FFNs channel-idle, which have BatchNorms of their
            own, with this share of hidden channels that skip the activation. Defaults to None.
        progressive_activations (bool): Let the idle channels start with an activation that fades.
            Defaults to False.
        bn_cfg (dict): The norm that merges, 'BN' or 'SyncBN'. Defaults to ``dict(type='BN')``.
        deploy (bool): Build the deploy form, for a reparameterized checkpoint. Defaults to False.

    Raises:
        ValueError: If activations are to fade and no channel is idle.
    """

    def __init__(
        self,
        *args,
        idle_ratio: float | None = None,
        progressive_activations: bool = False,
        bn_cfg: dict = dict(type='BN'),
        deploy: bool = False,
        **kwargs,
    ) -> None:
        super().__init__(*args, **kwargs)
        swap_attention(self)
        if idle_ratio is not None:
            idle_channels(self, idle_ratio, norm_cfg=bn_cfg)
        if progressive_activations:
            fade_activations(self)
        self._places = progressive_norms(self, bn_cfg)
        self._finish(deploy)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        own = {f'{prefix}{key}': value for key, value in self.state_dict().items()}
        for place in self._places:
            moved = place.moved()
            if not all(f'{prefix}{name}.weight' in state_dict for name in moved):
                continue
            for key in list(state_dict):
                for old, new in moved.items():
                    if key.startswith(f'{prefix}{old}.'):
                        rest = key[len(f'{prefix}{old}') :]
                        state_dict[f'{prefix}{new}{rest}'] = state_dict.pop(key)
            # What an ordinary backbone does not have: the BatchNorm, and lambda.
            for key, value in own.items():
                if key.startswith(f'{prefix}{place.form}.'):
                    state_dict.setdefault(key, value.clone())
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


@MODELS.register_module()
class ProgressiveVisionTransformer(ProgressiveBackbone, VisionTransformer):
    """Vision Transformer with progressive norms, which merge into attention and FFNs.

    `SLAB <https://arxiv.org/abs/2405.11582>`_: see :mod:`repa_mm.reparam.norms`. Merged, the blocks
    have no norm left.

    Args:
        *args, **kwargs: Those of mmpretrain's ``VisionTransformer``, and ``idle_ratio``,
            ``progressive_activations``, ``bn_cfg`` and ``deploy`` of :class:`ProgressiveBackbone`.

    Examples:
        >>> model = ProgressiveVisionTransformer('deit-tiny')
        >>> ...  # train, with DecayLayerNormsHook
        >>> deployed = repa_mm.reparameterize(model)
    """


@MODELS.register_module()
class ProgressiveSwinTransformer(ProgressiveBackbone, SwinStateDicts, SwinTransformer):
    """Swin Transformer with progressive norms, which merge into attention and FFNs.

    `SLAB <https://arxiv.org/abs/2405.11582>`_: see :mod:`repa_mm.reparam.norms`. Merged, the blocks
    have no norm left; those of patch embedding, patch merging and outputs are LayerNorms.

    Args:
        *args, **kwargs: Those of mmpretrain's ``SwinTransformer``, and ``idle_ratio``,
            ``progressive_activations``, ``bn_cfg`` and ``deploy`` of :class:`ProgressiveBackbone`.

    Examples:
        >>> model = ProgressiveSwinTransformer('tiny', out_indices=(0, 1, 2, 3))
        >>> ...  # train, with DecayLayerNormsHook
        >>> deployed = repa_mm.reparameterize(model)
    """
