"""ViT whose FFNs are experts, which merge into an ordinary ViT."""

from mmengine.registry import MODELS
from mmpretrain.models import VisionTransformer

from repa_mm.models.base import ReparamBackbone
from repa_mm.models.surgery.experts import experts_ffn, fill_experts
from repa_mm.models.surgery.idle import idle_channels


@MODELS.register_module()
class ExpertsVisionTransformer(ReparamBackbone, VisionTransformer):
    """Vision Transformer whose FFNs are experts, which merge into their mean.

    `Experts Weights Averaging <https://arxiv.org/abs/2308.06093>`_: see
    :mod:`repa_mm.reparam.experts`. Merged, it has, name by name, the weights of mmpretrain's
    ``VisionTransformer``, with the layer scale of the FFNs in their matrices.

    The weights of an ordinary ViT, given as ``init_cfg``, fill every expert: the backbone then
    begins as that ViT. Channel-idle experts are filled by a ``RePaVisionTransformer``.

    Args:
        *args, **kwargs: Those of mmpretrain's ``VisionTransformer``.
        num_experts (int): Number of experts of each FFN. Defaults to 4.
        idle_ratio (float, optional): Make the experts channel-idle, with this share of hidden
            channels that skip the activation. Defaults to None, ordinary FFNs.
        ffn_norm_cfg (dict): Norm of channel-idle FFNs. Defaults to ``dict(type='BN')``.
        deploy (bool): Build the deploy form, for a reparameterized checkpoint. Defaults to False.

    Raises:
        ValueError: If the number of experts is below 1, or an FFN is of a kind that cannot have
            experts.
    """

    def __init__(
        self,
        *args,
        num_experts: int = 4,
        idle_ratio: float | None = None,
        ffn_norm_cfg: dict = dict(type='BN'),
        deploy: bool = False,
        **kwargs,
    ) -> None:
        super().__init__(*args, **kwargs)
        if idle_ratio is not None:
            idle_channels(self, idle_ratio, norm_cfg=ffn_norm_cfg)
        for layer in self.layers:
            layer.ffn = experts_ffn(layer, num_experts)
        self._finish(deploy)

    # Merged weights have the names of an ordinary ViT. Only where a training is to begin are they
    # taken for one: elsewhere, weights in the wrong form are refused.
    _fills = False

    def init_weights(self) -> None:
        """As :meth:`ReparamBackbone.init_weights`, also from a ViT without experts."""
        self._fills = True
        try:
            super().init_weights()
        finally:
            self._fills = False

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        if self._fills:
            for name, layer in self.layers.named_children():
                fill_experts(state_dict, f'{prefix}layers.{name}.ffn.', layer.ffn)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
