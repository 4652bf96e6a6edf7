"""The script for a GPU, with small models on a CPU: each part runs and writes its rows."""

import sys
from pathlib import Path

import pytest
import torch

from benchmarks import on_a_gpu, tables
from repa_mm.apis import open_model
from repa_mm.convert import parts
from repa_mm.search import workbench
from repa_mm.search.formats import EAGER

OPTIONS = '--small', '--device', 'cpu', '--amp', 'float32', '--repeats', '1', '--out', 'out.csv'
LATENCY = 'stock', 'stock with our parts', 'deploy form'
ALL = *LATENCY, 'a quarter of each block'
ALL += tuple(f'{form}, CUDA graphs' for form in ALL)
SEARCHED = tuple(f'{name}, PyTorch' for name in ('stock', 'exact parts', '40 %'))
FORMS = {
    **dict.fromkeys(('retinanet', 'mask_rcnn', 'upernet', 'backbone', 'one_image'), LATENCY),
    'narrow': (*LATENCY, 'FFNs 0.2, heads a quarter'),
    **dict.fromkeys(('train_retinanet', 'train_mask_rcnn'), ('stock', 'literal', 'folded', 'auto')),
    **dict.fromkeys(('graphs_1', 'graphs_8', 'graphs_mask_rcnn', 'graphs_upernet'), ALL),
    'selection': ('all', 'before suppression', 'selection, fixed sizes'),
    'search': ('', *3 * SEARCHED),
    'search_swin_b': ('', *2 * SEARCHED),
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(*parts):
        monkeypatch.setattr(sys, 'argv', ['on_a_gpu', *OPTIONS, '--parts', *parts])
        on_a_gpu.main()

    return call


# They take the way of another part, with other arguments.
LIKE_ANOTHER = 'mask_rcnn', 'upernet', 'one_image', 'graphs_8', 'graphs_mask_rcnn', 'graphs_upernet'
LIKE_ANOTHER += ('train_retinanet', 'search_swin_b')


@pytest.mark.parametrize(
    'part',
    [
        pytest.param(part, marks=pytest.mark.slow if part in LIKE_ANOTHER else ())
        for part in on_a_gpu.PARTS
    ],
)
def test_part(part, run, monkeypatch):
    def train(cfg, folder):
        Path(folder).mkdir(parents=True)
        torch.save(dict(state_dict=open_model(cfg).state_dict()), f'{folder}/weights.pth')
        return f'{folder}/weights.pth'

    monkeypatch.setattr(on_a_gpu, 'train', train)
    monkeypatch.setattr(parts, 'refine', lambda fit, *_: fit)
    monkeypatch.setattr(on_a_gpu, 'cuda_graphs_', lambda model: model)  # on a GPU alone
    monkeypatch.setattr(workbench, 'installed_formats', lambda *_: ([EAGER], []))
    run(part)
    rows = tables.read('out.csv')
    assert tuple(row['form'] for row in rows) == FORMS[part]
    assert all(float(row['value']) > 0 for row in rows if row['unit'])
    assert {row['command'] for row in rows} == {'python -m benchmarks.on_a_gpu'}
    assert {row['cpu'] for row in rows} == {'CPU'}
