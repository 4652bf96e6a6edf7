import time

import pytest
import torch
import torch.nn as nn

import repa_mm
from benchmarks.shares import detector_parts, ffn_modules, measure_shares
from repa_mm.io.configs import load_config
from tests.conftest import random_model


class Tick(nn.Module):
    """Moves the clock on."""

    now = 0.0

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, x):
        Tick.now += self.seconds
        return x


class Block(nn.Sequential):
    def __init__(self):
        super().__init__()
        for name, seconds in dict(norm1=0, attn=0.03, norm2=0.005, ffn=0.005).items():
            self.add_module(name, Tick(seconds))


def test_share(monkeypatch):
    monkeypatch.setattr(time, 'perf_counter', lambda: Tick.now)
    model = nn.Sequential(Block(), Block())
    parts = {'a': {'FFNs': ffn_modules(model), 'attention': [block.attn for block in model]}}
    times, spent = measure_shares({'a': model}, parts, torch.ones(1), 3)
    ffns, attention = (spent['a'][part] for part in ('FFNs', 'attention'))
    assert ffns == pytest.approx([20] * 3) and attention == pytest.approx([60] * 3)
    assert times['a'] == pytest.approx([80] * 3)


def test_parts_of_a_detector():
    pytest.importorskip('mmdet')
    config = repa_mm.config_path('demo/dino_detr_swin_digits.py')
    model = random_model(load_config(config))
    parts = detector_parts(model)
    assert {part: len(modules) for part, modules in parts.items()} == {
        'backbone': 1, 'neck': 1, "encoder's attention": 3, "encoder's FFNs": 3, 'decoder': 1,
        'head': 1,
    }  # fmt: skip
    assert parts["encoder's FFNs"][2] is model.encoder.layers[2].ffn


@pytest.mark.parametrize('prefix', ['', 'repa_'])
def test_ffns_of_every_block(prefix):
    pytest.importorskip('mmdet')
    config = repa_mm.config_path(f'demo/retinanet_{prefix}swin_digits.py')
    backbone = random_model(load_config(config)).backbone
    names = {id(m): n.rpartition('.')[2] for n, m in backbone.named_modules()}
    found = [names[id(module)] for module in ffn_modules(backbone)]
    assert sorted(found) == ['ffn'] * 10 + ['norm2'] * 10
