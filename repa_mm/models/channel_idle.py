"""RePa backbones: MMPretrain's DeiT, ViT, Swin, PoolFormer and MLP-Mixer with channel-idle FFNs."""

from collections.abc import Sequence

import torch
import torch.nn as nn
from mmengine.registry import MODELS
from mmpretrain.models import MlpMixer, PoolFormer, SwinTransformer, VisionTransformer

from repa_mm.models.builder import WithStructures


class RePaBackbone(WithStructures):
    """Mixin that makes the FFNs of an mmpretrain backbone channel-idle.

    Args:
        *args: Arguments of the mmpretrain backbone.
        idle_ratio (float | Sequence[float]): Share of FFN hidden channels that skip the activation,
            in [0, 1], one for all blocks or one per block. Defaults to 0.75.
        ffn_norm_cfg (dict): Norm of the FFNs: 'BN', 'SyncBN', 'LN' or 'keep', see
            :class:`~repa_mm.models.structures.ChannelIdle`. Defaults to ``dict(type='BN')``.
        structures (Sequence[dict]): Further structures, put in after the FFNs. Defaults to none.
        **kwargs: Keyword arguments of the mmpretrain backbone, and ``deploy``, ``fast_attention``
            and ``norm_eval`` of :class:`~repa_mm.models.builder.WithStructures`.
    """

    def __init__(
        self,
        *args,
        idle_ratio: float | Sequence[float] = 0.75,
        ffn_norm_cfg: dict = dict(type='BN'),
        structures: Sequence[dict] = (),
        **kwargs,
    ) -> None:
        structure = dict(type='ChannelIdle', idle_ratio=idle_ratio, norm_cfg=ffn_norm_cfg)
        super().__init__(*args, structures=[structure, *structures], **kwargs)

    def init_weights(self) -> None:
        try:
            super().init_weights()
        except FileNotFoundError as error:
            arch = self.build_ordinary.keywords.get('arch', 'of this size')
            raise FileNotFoundError(
                f'{error} Download the weights of a {type(self).__name__} {arch} with the same '
                'idle ratio, not reparameterized, from https://huggingface.co/Ackesnal/RePaViT, '
                'and save the file under this name. It is translated as it is loaded. Or make '
                'this file from ordinary weights: python tools/convert_pretrained.py CONFIG '
                f'CHECKPOINT THIS_FILE --idle-ratio {self.placed[0][0].idle_ratio} --images FOLDER'
            ) from error


@MODELS.register_module()
class RePaVisionTransformer(RePaBackbone, VisionTransformer):
    """`DeiT <https://arxiv.org/abs/2012.12877>`_ and ViT with channel-idle FFNs.

    The released weights have ``pre_norm=True`` and a larger epsilon in the blocks, see
    ``configs/_base_/models/vit_classifier.py``.

    Args:
        *args, **kwargs: Arguments of mmpretrain's ``VisionTransformer``, such as the ``arch``
            'deit-tiny', 'deit-small', 'deit-base', 'large' or 'huge', and of :class:`RePaBackbone`.
    """


@MODELS.register_module()
class RePaSwinTransformer(RePaBackbone, SwinTransformer):
    """`Swin Transformer <https://arxiv.org/abs/2103.14030>`_ with channel-idle FFNs.

    Args:
        *args, **kwargs: Arguments of mmpretrain's ``SwinTransformer`` and :class:`RePaBackbone`.
        pad_small_map (bool, optional): Pad and shift feature maps that are no larger than a window,
            as MMDetection and MMSegmentation do. Defaults to True with several outputs, else to
            mmpretrain's False.

    Examples:
        >>> model = RePaSwinTransformer('base', out_indices=(0, 1, 2, 3))
        >>> features = model(torch.rand(1, 3, 224, 224))
        >>> deployed = repa_mm.reparameterize(model)
    """

    def __init__(self, *args, pad_small_map: bool | None = None, **kwargs) -> None:
        if pad_small_map is None:
            pad_small_map = len(kwargs.get('out_indices', ())) > 1
        super().__init__(*args, pad_small_map=pad_small_map, **kwargs)


@MODELS.register_module()
class RePaPoolFormer(RePaBackbone, PoolFormer):
    """`PoolFormer <https://arxiv.org/abs/2111.11418>`_ with channel-idle FFNs.

    The released weights have ``pool_size=7``, see
    ``configs/_base_/models/poolformer_classifier.py``.

    Args:
        *args, **kwargs: Arguments of mmpretrain's ``PoolFormer`` and :class:`RePaBackbone`.
        frozen_stages (int): Number of parts of ``network`` to freeze, together with the patch
            embedding. 0 freezes the patch embedding alone. Defaults to -1, which freezes nothing.
    """

    def __init__(self, *args, frozen_stages: int = -1, **kwargs) -> None:
        super().__init__(*args, frozen_stages=frozen_stages, **kwargs)


class TokenNorm(nn.LayerNorm):
    """LayerNorm over the tokens of each channel, x of shape (B, L, C)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


@MODELS.register_module()
class RePaMlpMixer(RePaBackbone, MlpMixer):
    """`MLP-Mixer <https://arxiv.org/abs/2105.01601>`_ with channel-idle channel-mixing FFNs.

    The token-mixing FFNs stay ordinary, so the image size stays fixed.

    Args:
        *args, **kwargs: Arguments of mmpretrain's ``MlpMixer`` and :class:`RePaBackbone`.
        token_norm (bool): Normalize over the tokens of each channel before a token-mixing FFN, as
            RePaFormer's released code does, instead of over the channels of each token. Defaults
            to False.
    """

    def __init__(self, *args, token_norm: bool = False, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if token_norm:
            for layer in self.layers:
                norm = TokenNorm(layer.token_mix.embed_dims, layer.norm1.eps)
                setattr(layer, layer.norm1_name, norm)
