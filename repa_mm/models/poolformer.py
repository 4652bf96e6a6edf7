"""RePa-PoolFormer."""

from mmengine.registry import MODELS
from mmpretrain.models import PoolFormer

from repa_mm.models.base import RePaBackbone, adapt_output_norms


@MODELS.register_module()
class RePaPoolFormer(RePaBackbone, PoolFormer):
    """PoolFormer with channel-idle FFNs.

    `RePaFormer <https://arxiv.org/abs/2505.21847>`_ applied to `PoolFormer
    <https://arxiv.org/abs/2111.11418>`_. The released weights have ``pool_size=7``, see
    ``configs/_base_/models/poolformer_classifier.py``.

    Args:
        *args, **kwargs: Those of mmpretrain's ``PoolFormer``, and ``idle_ratio``,
            ``idle_schedule``, ``ffn_norm_cfg`` and ``deploy`` of :class:`RePaBackbone`.
        frozen_stages (int): Parts of ``network`` to freeze, and with them the patch embedding,
            which the parent freezes for 0 too. Defaults to -1, nothing.

    Examples:
        >>> model = RePaPoolFormer('s12', out_indices=(0, 2, 4, 6))
        >>> features = model(torch.rand(1, 3, 224, 224))
        >>> deployed = repa_mm.reparameterize(model)
    """

    def __init__(self, *args, frozen_stages: int = -1, **kwargs) -> None:
        super().__init__(*args, frozen_stages=frozen_stages, **kwargs)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        adapt_output_norms(self, state_dict, prefix, f'norm{len(self.network) - 1}')
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
