"""RePa-ViT: DeiT and ViT."""

from mmengine.registry import MODELS
from mmpretrain.models import VisionTransformer

from repa_mm.models.base import RePaBackbone


@MODELS.register_module()
class RePaVisionTransformer(RePaBackbone, VisionTransformer):
    """Vision Transformer with channel-idle FFNs.

    `RePaFormer <https://arxiv.org/abs/2505.21847>`_ applied to `DeiT
    <https://arxiv.org/abs/2012.12877>`_ ('deit-tiny', 'deit-small', 'deit-base') and `ViT
    <https://arxiv.org/abs/2010.11929>`_ ('large', 'huge'). The released weights have
    ``pre_norm=True`` and a larger epsilon in the blocks, see
    ``configs/_base_/models/vit_classifier.py``.

    Args:
        *args, **kwargs: Those of mmpretrain's ``VisionTransformer``, and ``idle_ratio``,
            ``idle_schedule``, ``ffn_norm_cfg`` and ``deploy`` of :class:`RePaBackbone`.

    Examples:
        >>> model = RePaVisionTransformer('deit-base', out_type='featmap')
        >>> features = model(torch.rand(1, 3, 224, 224))
        >>> deployed = repa_mm.reparameterize(model)
    """
