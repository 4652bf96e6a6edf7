import copy
from fractions import Fraction

import pytest
import torch
from mmengine.registry import MODELS
from torch.overrides import TorchFunctionMode

import repa_mm
from benchmarks.paper import counterpart_, paper_rows
from repa_mm.apis import open_model
from repa_mm.faster import rewrite_
from repa_mm.io.configs import load_config
from repa_mm.measure.complexity import count

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
        model = MODELS.build(cfg.model)
        return counterpart_(model) if form == 'vanilla' else model.eval()


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


def test_poolformers_differ_in_the_memory_format_too():
    cfg = load_config(repa_mm.config_path('repa_poolformer_s12_in1k.py'))
    cfg.model.backbone.arch = dict(
        layers=[1, 1, 1, 1], embed_dims=[4, 8, 12, 16], mlp_ratios=[4] * 4,
        layer_scale_init_value=0.1,
    )  # fmt: skip
    cfg.model.head.in_channels = 16
    stock, formats = counterpart_(open_model(cfg)), []
    models = stock, copy.deepcopy(stock)
    assert [rewrite.name for _, rewrite in rewrite_(models[1], 'train', 'infer')] == ['PoolFormer']
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(*(model(x) for model in models))
    for model in models:
        model.backbone.network[2].register_forward_hook(
            lambda *args: formats.append(args[2].is_contiguous(memory_format=torch.channels_last))
        )
        model(x)
    assert formats == [False, True]
