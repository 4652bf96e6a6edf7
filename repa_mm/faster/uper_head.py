"""UperNet's head without a convolution of resized feature maps."""

from collections.abc import Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmcv.cnn import Conv2d, ConvModule
from mmseg.models import UPerHead

from repa_mm.faster.fusing import FusedConvModule
from repa_mm.surgery import has_stock_forward


def _taps(
    size: int, new_size: int, align_corners: bool, kernel_size: int, like: torch.Tensor
) -> list[torch.Tensor]:
    """Return the matrix (new_size, size) that each tap of a convolution applies to a resized axis.

    The matrix resizes the axis and shifts it by the tap's offset, with zeros outside.
    """
    pad = kernel_size // 2
    # By arithmetic, since exporters cannot resize identity matrices of any size. In half precision
    # the weights would be coarse.
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
    """Compute out += conv(resize(x)) in place, with the convolution's products before the resizing.

    Each tap of a convolution mixes channels and bilinear resizing mixes positions, so the two
    commute. Before the resizing, the products are fewer by the square of the scale.

    ``out`` (B, C', H, W) is contiguous, x is (B, C, h, w), and ``weight`` (C', C, k, k) that of a
    convolution with odd k, stride 1 and zero padding of k // 2.
    """
    batch, _, height, width = x.shape
    channels, k = weight.shape[0], weight.shape[-1]
    new_height, new_width = out.shape[2:]
    weight = weight.permute(3, 2, 0, 1).flatten(0, 2)
    # A pointwise convolution, faster than with F.conv2d.
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


class FastUPerHead(UPerHead):
    """A faster ``UPerHead`` with the same arguments, parameters, state dict and outputs.

    The last convolution of the head has half of the multiplications of a whole UperNet. It takes
    the feature maps of all levels, resized to the largest one. Here, each level is convolved before
    it is resized, see :func:`add_conv_of_resized`. With a hook on this convolution or another
    module in its place, the parent's code runs.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if not self.is_ordinary():
            raise ValueError(
                f'FastUPerHead needs ordinary convolutions, but got {self.fpn_bottleneck.conv}: '
                "use type='UPerHead'"
            )

    @torch.compiler.assume_constant_result
    def is_ordinary(self) -> bool:
        """Return True if the convolution of resized maps is as MMSegmentation builds it."""
        module = self.fpn_bottleneck
        if not has_stock_forward(module, FusedConvModule, ConvModule, conv=(Conv2d, nn.Conv2d)):
            return False
        conv = module.conv
        return (
            conv.padding_mode == 'zeros'
            and not module.with_explicit_padding
            and module.order == ('conv', 'norm', 'act')
            and (conv.stride, conv.dilation, conv.groups) == ((1, 1), (1, 1), 1)
            and conv.kernel_size == tuple(2 * p + 1 for p in conv.padding)
            and conv.kernel_size[0] == conv.kernel_size[1]
        )

    def _forward_feature(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        if not self.is_ordinary():
            return super()._forward_feature(inputs)
        inputs = self._transform_inputs(inputs)
        laterals = [conv(x) for conv, x in zip(self.lateral_convs, inputs)]
        laterals.append(self.psp_forward(inputs))
        how = dict(mode='bilinear', align_corners=self.align_corners)
        for i in range(len(laterals) - 1, 0, -1):
            larger = laterals[i - 1]
            laterals[i - 1] = larger + F.interpolate(laterals[i], larger.shape[2:], **how)
        maps = [conv(x) for conv, x in zip(self.fpn_convs, laterals)] + laterals[-1:]
        module, conv = self.fpn_bottleneck, self.fpn_bottleneck.conv
        weights = conv.weight.split([x.shape[1] for x in maps], dim=1)
        out = F.conv2d(maps[0], weights[0], conv.bias, padding=conv.padding)
        for x, weight in zip(maps[1:], weights[1:]):
            out = add_conv_of_resized(out, x, weight, self.align_corners)
        out = module.norm(out) if module.with_norm else out
        return module.activate(out) if module.with_activation else out
