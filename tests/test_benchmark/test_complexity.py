import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from mmcv.ops import DeformConv2dPack, ModulatedDeformConv2dPack

from repa_mm.benchmark.complexity import count
from repa_mm.faster.uper_head import ConvModuleOfResized


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


def test_batched_products_with_weights():
    maps = X, X[:, :, :4, :4]
    conv = ConvModuleOfResized(6, 5, 3, padding=1)
    # The convolution of the first map; for the second nine products at its own size.
    least = 2 * (64 + 16) * 5 * 27
    macs = count(conv, (maps, False))[1]
    assert least < macs < 2 * least
    assert count(conv, dict(maps=maps, align_corners=False))[1] == macs
    assert not conv._forward_hooks and not conv._forward_pre_hooks
