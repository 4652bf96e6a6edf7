"""LV-ViT and RePa-LV-ViT."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from mmpretrain.models import VisionTransformer
from mmpretrain.models.utils import resize_pos_embed, to_2tuple

from repa_mm.models import RePaBackbone
from repa_mm.reparam import TrainingForm


class ConvStem(BaseModule):
    """Three convolutions before the patches are taken.

    Args:
        img_size (int | tuple): The usual image size.
        patch_size (int): Even. Defaults to 16.
        in_channels (int): Defaults to 3.
        hidden_channels (int): Of the convolutions. Defaults to 64.
        embed_dims (int): Of the tokens. Defaults to 384.
    """

    def __init__(
        self,
        img_size=224,
        patch_size: int = 16,
        in_channels: int = 3,
        hidden_channels: int = 64,
        embed_dims: int = 384,
    ) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.init_out_size = tuple(-(-size // patch_size) for size in to_2tuple(img_size))
        channels, layers = [in_channels, *[hidden_channels] * 3], []
        for i, (kernel, stride) in enumerate(((7, 2), (3, 1), (3, 1))):
            conv = nn.Conv2d(*channels[i : i + 2], kernel, stride, kernel // 2, bias=False)
            layers += [conv, nn.BatchNorm2d(hidden_channels), nn.ReLU(inplace=True)]
        self.stem = nn.Sequential(*layers)
        self.projection = nn.Conv2d(hidden_channels, embed_dims, patch_size // 2, patch_size // 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
        """Tokens (B, L, C) of images (B, in_channels, H, W), and their grid.

        Images are padded to whole patches on the right and at the bottom.
        """
        h, w = x.shape[2:]
        x = F.pad(x, (0, -w % self.patch_size, 0, -h % self.patch_size))
        x = self.projection(self.stem(x))
        return x.flatten(2).transpose(1, 2), tuple(x.shape[2:])


class Scale(nn.Module):
    """Multiplication by a constant, in the place of a layer scale."""

    def __init__(self, embed_dims: int, value: float) -> None:
        super().__init__()
        self.register_buffer('weight', torch.full((embed_dims,), value), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def random_region(height: int, width: int) -> torch.Tensor:
    """Return a random rectangle, as CutMix draws it, True in a (height, width) map.

    Its share of the area is uniform before it is cut at the border.
    """
    side = torch.rand(()).item() ** 0.5
    region = torch.zeros(height, width, dtype=torch.bool)
    places = []
    for size in (height, width):
        center, half = int(torch.randint(size, ())), int(size * side) // 2
        places.append(slice(max(center - half, 0), center + half))
    region[tuple(places)] = True
    return region


@MODELS.register_module()
class LVViT(VisionTransformer):
    """LV-ViT, a Vision Transformer made for training with token labels.

    `All Tokens Matter <https://arxiv.org/abs/2104.10858>`_: convolutions before the patches, scaled
    residual branches, and a training that mixes the tokens of pairs of images.

    Args:
        arch (str | dict): 's' or 'm', or a dict as mmpretrain's ``VisionTransformer`` takes it.
            Defaults to 's'.
        residual_scale (float): Factor of all residual branches. Defaults to 0.5.
        mix_token (bool): In training, replace a random rectangle of every image's tokens by the
            same rectangle of another image of the batch, and put the tokens back behind the last
            block. Needs ``out_type='token_label'``. Defaults to False.
        out_type (str): One of those of ``VisionTransformer``, or 'token_label': all tokens (B, 1 +
            H * W, C), the class token first, the grid (H, W), and the share (a scalar) of an
            image's own tokens that its class token has seen. Defaults to 'cls_token'.
        stem_channels (int): Of the convolutions before the patches. Defaults to 64.
        **kwargs: Those of mmpretrain's ``VisionTransformer``.
    """

    arch_zoo = {
        name: dict(
            embed_dims=channels,
            num_layers=layers,
            num_heads=channels // 64,
            feedforward_channels=3 * channels,
        )
        for names, channels, layers in ((('s', 'small'), 384, 16), (('m', 'medium'), 512, 20))
        for name in names
    }
    OUT_TYPES = VisionTransformer.OUT_TYPES | {'token_label'}

    def __init__(
        self,
        arch='s',
        img_size=224,
        patch_size: int = 16,
        in_channels: int = 3,
        residual_scale: float = 0.5,
        mix_token: bool = False,
        out_type: str = 'cls_token',
        stem_channels: int = 64,
        qkv_bias: bool = False,
        norm_cfg: dict = dict(type='LN'),
        frozen_stages: int = -1,
        **kwargs,
    ) -> None:
        if mix_token and out_type != 'token_label':
            raise ValueError(
                f"mix_token=True needs out_type='token_label', but got {out_type!r}: the loss has "
                'to know what was mixed'
            )
        kwargs.update(out_type=out_type, qkv_bias=qkv_bias, norm_cfg=norm_cfg)
        super().__init__(arch, img_size, patch_size, in_channels, **kwargs)
        self.mix_token = mix_token
        self.residual_scale = residual_scale
        widths = in_channels, stem_channels, self.embed_dims
        self.patch_embed = ConvStem(img_size, patch_size, *widths)
        for layer in self.layers:
            layer.attn.gamma1 = Scale(self.embed_dims, residual_scale)
            layer.ffn.gamma2 = Scale(self.embed_dims, residual_scale)
        self.frozen_stages = frozen_stages
        if frozen_stages > 0:
            self._freeze_stages()

    def forward(self, x: torch.Tensor) -> tuple:
        x, hw = self.patch_embed(x)
        share, region = x.new_ones(()), None
        if self.mix_token and self.training:
            region = random_region(*hw).view(1, -1, 1).to(x.device)
            share = 1 - region.to(x.dtype).mean()
            x = torch.where(region, x.flip(0), x)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        extra = self.num_extra_tokens
        position = resize_pos_embed(
            self.pos_embed, self.patch_resolution, hw, self.interpolate_mode, extra
        )
        x = self.pre_norm(self.drop_after_pos(x + position))
        outs = []
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == len(self.layers) - 1 and self.final_norm:
                x = self.ln1(x)
            if i not in self.out_indices:
                continue
            out = x
            if region is not None:
                patches = x[:, extra:]
                patches = torch.where(region, patches.flip(0), patches)
                out = torch.cat([x[:, :extra], patches], dim=1)
            is_labelled = self.out_type == 'token_label'
            outs.append((out, hw, share) if is_labelled else self._format_output(out, hw))
        return tuple(outs)

    def train(self, mode: bool = True):
        super().train(mode)
        # The parent freezes once, which is not enough for BatchNorm.
        if mode and self.frozen_stages > 0:
            self._freeze_stages()
        return self


@MODELS.register_module()
class RePaLVViT(RePaBackbone, LVViT):
    """LV-ViT with channel-idle FFNs.

    `RePaFormer <https://arxiv.org/abs/2505.21847>`_ applied to `LV-ViT
    <https://arxiv.org/abs/2104.10858>`_. Its FFNs are only three times as wide as the tokens: with
    as many active channels as in the paper's model (one for each channel of the tokens) the idle
    ratio is 2/3.

    The authors' FFNs see the tokens divided by the residual scale. A BatchNorm undoes this division
    except for its ``eps``, so that ``eps`` is smaller here.

    Args:
        *args, **kwargs: Those of :class:`LVViT`, and of :class:`RePaBackbone`.

    Examples:
        >>> model = RePaLVViT('s', idle_ratio=2 / 3, out_type='featmap')
        >>> features = model(torch.rand(1, 3, 224, 224))
        >>> deployed = repa_mm.reparameterize(model)
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, TrainingForm):
                # The first BatchNorm of each sees the tokens.
                for norm in module.batch_norms()[:1]:
                    norm.eps *= self.residual_scale**2
