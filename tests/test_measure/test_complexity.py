import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from mmcv.ops import DeformConv2dPack, ModulatedDeformConv2dPack
from mmseg.models import UPerHead

from repa_mm.faster import fuse_conv_bn_, rewrite_
from repa_mm.measure.complexity import count
from repa_mm.surgery import hooks_of


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


X = torch.zeros(2, 3, 8, 8)


@pytest.mark.parametrize(
    'model, macs',
    [
        (nn.Conv2d(3, 5, 3, padding=1), 2 * 64 * 5 * 27),
        (nn.Conv2d(3, 3, 3, padding=1, groups=3), 2 * 64 * 27),
        (nn.ConvTranspose2d(3, 5, 2, 2), 2 * 64 * 3 * 5 * 4),
        # With the convolution that computes offsets, and 9 masks.
        (DeformConv2dPack(3, 3, 3, padding=1), 2 * 64 * (3 + 18) * 27),
        (ModulatedDeformConv2dPack(3, 3, 3, padding=1), 2 * 64 * (3 + 27) * 27),
        (nn.Linear(8, 4, bias=False), 2 * 24 * 32),
        (Call(lambda x: nn.Linear(8, 4)(x.transpose(2, 3))), 2 * 24 * 32),
        (Call(lambda x: torch.addmm(x[0, 0], x[0, 1], x[0, 2])), 512),
        (nn.Sequential(nn.BatchNorm2d(3), nn.GELU(), nn.LayerNorm(8)).eval(), 0),
        (Call(lambda x: F.scaled_dot_product_attention(x, x, x)), 0),
        (Call(lambda x: x @ x), 0),
    ],
)
def test_products_with_weights(model, macs):
    assert count(model, X) == (sum(p.numel() for p in model.parameters()), macs)


@pytest.mark.parametrize('norm', [None, dict(type='BN')])
def test_a_faster_head_counts_as_the_stock_head(norm):
    options = dict(in_channels=[3, 4], in_index=[0, 1], channels=5, num_classes=7, norm_cfg=norm)
    stock = UPerHead(pool_scales=(1, 2), **options).eval()
    fast = copy.deepcopy(stock)
    assert rewrite_(fast, 'train')
    maps = [torch.zeros(2, 3, 8, 8), torch.zeros(2, 4, 4, 4)]
    # Pyramid pooling of the second map, lateral and output convolution of the first, the
    # convolution of both maps at the size of the first, and the classes.
    macs = 4 * 5 * (1 + 4) + 16 * 9 * (4 + 2 * 5) * 5
    macs += 64 * (3 * 5 + 9 * 5 * 5 + 9 * 2 * 5 * 5 + 5 * 7)
    for head in (stock, fast, fuse_conv_bn_(copy.deepcopy(fast))):
        assert count(head, dict(inputs=maps))[1] == count(head, (maps,))[1] == 2 * macs
        assert not hooks_of(head.fpn_bottleneck)
    assert count(fast, (maps,))[0] == sum(p.numel() for p in stock.parameters())
