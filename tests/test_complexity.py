from fractions import Fraction

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import repa_mm
from repa_mm.benchmark.complexity import count
from repa_mm.benchmark.paper import counterpart, paper_rows
from repa_mm.run import build_model, load_config

ROWS = paper_rows()


class OnMeta(TorchFunctionMode):
    """Models without memory, but for the few numbers that are read while they are built."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        with torch.device('cpu' if func is torch.linspace else 'meta'):
            return func(*args, **(kwargs or {}))


def build(config, idle_ratio, form):
    cfg = load_config(repa_mm.config_path(config))
    backbone = cfg.model.backbone
    if backbone.type == 'RePaSwinTransformer':
        backbone.fast_attention = False  # looks at its mask
    if form != 'vanilla':
        backbone.update(idle_ratio=float(Fraction(idle_ratio)), deploy=form == 'deploy')
    with OnMeta():
        return counterpart(cfg) if form == 'vanilla' else build_model(cfg)


@pytest.mark.parametrize('name', dict.fromkeys(row['model'] for row in ROWS))
def test_every_row_of_the_paper(name):
    """Tables 1, 2, 4 and 8; its profiler counts norms, biases and activations, too."""
    for row in ROWS:
        if row['model'] == name:
            model = build(row['config'], row['idle_ratio'], row['form'])
            parameters, macs = count(model, torch.empty(1, 3, 224, 224, device='meta'))
            assert parameters / 1e6 == pytest.approx(float(row['parameters']), abs=0.1)
            gmacs = float(row['gmacs'])
            assert gmacs - 0.1 - 0.01 * gmacs < macs / 1e9 < gmacs + 0.05


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
    pytest.importorskip('mmseg')
    from repa_mm.models.heads.uper_head import ConvModuleOfResized

    maps = X, X[:, :, :4, :4]
    conv = ConvModuleOfResized(6, 5, 3, padding=1)
    # The convolution of the first map; for the second nine products at its own size.
    least = 2 * (64 + 16) * 5 * 27
    macs = count(conv, (maps, False))[1]
    assert least < macs < 2 * least
    assert count(conv, dict(maps=maps, align_corners=False))[1] == macs
    assert not conv._forward_hooks and not conv._forward_pre_hooks
