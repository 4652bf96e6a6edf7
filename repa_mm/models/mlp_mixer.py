"""RePa-MLP-Mixer."""

import torch
import torch.nn as nn
from mmengine.registry import MODELS
from mmpretrain.models import MlpMixer

from repa_mm.models.base import RePaBackbone


class TokenNorm(nn.LayerNorm):
    """LayerNorm over the tokens of each channel, x of shape (B, L, C)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


@MODELS.register_module()
class RePaMlpMixer(RePaBackbone, MlpMixer):
    """MLP-Mixer whose channel-mixing FFNs are channel-idle.

    `RePaFormer <https://arxiv.org/abs/2505.21847>`_ applied to `MLP-Mixer
    <https://arxiv.org/abs/2105.01601>`_. The token-mixing FFNs stay as they are, and with them the
    fixed image size.

    Args:
        *args, **kwargs: Those of mmpretrain's ``MlpMixer``, and ``idle_ratio``, ``idle_schedule``,
            ``ffn_norm_cfg`` and ``deploy`` of :class:`RePaBackbone`.
        token_norm (bool): Whether the norm before a token-mixing FFN is over the tokens of each
            channel, as in RePaFormer's released code, instead of over the channels of each token.
            Defaults to False.

    Examples:
        >>> model = RePaMlpMixer('base')
        >>> features = model(torch.rand(1, 3, 224, 224))
        >>> deployed = repa_mm.reparameterize(model)
    """

    def __init__(self, *args, token_norm: bool = False, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if token_norm:
            for layer in self.layers:
                norm = TokenNorm(layer.token_mix.embed_dims, layer.norm1.eps)
                setattr(layer, layer.norm1_name, norm)
