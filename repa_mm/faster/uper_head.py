"""UperNet's head without a convolution of resized maps."""

from collections.abc import Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmcv.cnn import ConvModule
from mmseg.models import UPerHead

from repa_mm.reparam import become


def _taps(
    size: int, new_size: int, align_corners: bool, kernel_size: int, like: torch.Tensor
) -> list[torch.Tensor]:
    """What each tap of a convolution sees of a resized axis.

    Linear maps (new_size, size), with zeros where the tap is outside.
    """
    pad = kernel_size // 2
    # By arithmetic, as exporters do not resize identity matrices of any size; weights in half
    # precision would be coarse.
    dtype = torch.promote_types(like.dtype, torch.float32)
    columns = torch.arange(size, device=like.device).to(dtype)
    rows = torch.arange(new_size, device=like.device).to(dtype)
    if align_corners:
        source = rows * ((columns.shape[0] - 1) / (rows.shape[0] - 1 + 1e-30))
    else:
        source = (rows + 0.5) * (columns.shape[0] / rows.shape[0]) - 0.5
    source = source.clamp(min=0).clamp(max=columns.shape[0] - 1)
    matrix = (1 - (source[:, None] - columns).abs()).clamp(min=0)
    matrix = F.pad(matrix.to(like.dtype), (0, 0, pad, pad))
    return [matrix[i : i + new_size] for i in range(kernel_size)]


def add_conv_of_resized(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, align_corners: bool
) -> torch.Tensor:
    """Out += conv(resize(x)), with the products taken before the resizing.

    The taps of a convolution mix channels and bilinear resizing mixes places, so that their order
    can be exchanged. At the map's own size the products are fewer by the square of the scale, and
    the resizing adds two small products.

    Args:
        out (torch.Tensor): Map of shape (B, C', H, W), contiguous.
        x (torch.Tensor): Map of shape (B, C, h, w).
        weight (torch.Tensor): Of shape (C', C, k, k), k odd, for stride 1 and zeros around the map.
        align_corners (bool): As in :func:`torch.nn.functional.interpolate`.

    Returns:
        torch.Tensor: ``out``.
    """
    batch, _, height, width = x.shape
    channels, k = weight.shape[0], weight.shape[-1]
    new_height, new_width = out.shape[2:]
    weight = weight.permute(3, 2, 0, 1).flatten(0, 2)
    # A pointwise convolution, in less time than F.conv2d takes for it.
    x = torch.bmm(weight.expand(batch, -1, -1), x.flatten(2))
    x = x.view(batch, k, k * channels * height, width)
    across = _taps(width, new_width, align_corners, k, x)
    y = torch.bmm(x[:, 0], across[0].t().expand(batch, -1, -1))
    for i in range(1, k):
        y = y.baddbmm_(x[:, i], across[i].t().expand(batch, -1, -1))
    y = y.view(batch, k, channels, height, new_width)
    down = _taps(height, new_height, align_corners, k, x)
    z = out.flatten(0, 1)
    for i in range(k):
        z = z.baddbmm_(down[i].expand(z.shape[0], -1, -1), y[:, i].flatten(0, 1).to(z.dtype))
    return z.view(out.shape)


class ConvModuleOfResized(ConvModule):
    """A ``ConvModule`` of maps that are resized to the first and stacked."""

    #: Operators that multiply by weights in here, besides convolutions.
    weight_operators = ('bmm',)

    def forward(self, maps: Sequence[torch.Tensor], align_corners: bool) -> torch.Tensor:
        """Maps (B, C, H, W), (B, C, h, w), ... to a map (B, C', H, W)."""
        conv = self.conv
        weights = conv.weight.split([x.shape[1] for x in maps], dim=1)
        out = F.conv2d(maps[0], weights[0], conv.bias, padding=conv.padding)
        for x, weight in zip(maps[1:], weights[1:]):
            out = add_conv_of_resized(out, x, weight, align_corners)
        if self.with_norm:
            out = self.norm(out)
        return self.activate(out) if self.with_activation else out


class FastUPerHead(UPerHead):
    """A ``UPerHead`` that computes the same in less time.

    The last convolution of the head takes the maps of all levels, resized to the largest: half of
    the multiplications of a whole UperNet. Here, they are taken level by level, see
    :func:`add_conv_of_resized`. Arguments, parameters and state dict are those of MMSegmentation's
    ``UPerHead``.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        become(self.fpn_bottleneck, ConvModuleOfResized)

    def _forward_feature(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        inputs = self._transform_inputs(inputs)
        laterals = [conv(x) for conv, x in zip(self.lateral_convs, inputs)]
        laterals.append(self.psp_forward(inputs))
        how = dict(mode='bilinear', align_corners=self.align_corners)
        for i in range(len(laterals) - 1, 0, -1):
            larger = laterals[i - 1]
            laterals[i - 1] = larger + F.interpolate(laterals[i], larger.shape[2:], **how)
        maps = [conv(x) for conv, x in zip(self.fpn_convs, laterals)] + laterals[-1:]
        return self.fpn_bottleneck(maps, self.align_corners)


def fast_uper_head(model: nn.Module) -> nn.Module:
    """Make every ``UPerHead`` of a model a :class:`FastUPerHead`, in place.

    Args:
        model (nn.Module): A segmentor, or any model.

    Returns:
        nn.Module: The same model.
    """
    for module in model.modules():
        if type(module) is UPerHead:
            become(module, FastUPerHead)
            become(module.fpn_bottleneck, ConvModuleOfResized)
    return model
