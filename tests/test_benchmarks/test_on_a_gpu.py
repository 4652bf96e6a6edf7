"""The script for a GPU, with small models on a CPU: each part runs and writes its rows."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn

from benchmarks import on_a_gpu, tables
from repa_mm.apis import open_model
from repa_mm.convert import parts
from repa_mm.search import bench
from repa_mm.search.formats import EAGER

pytest.importorskip('mmdet')
pytest.importorskip('mmseg')
pytest.importorskip('sklearn')
pytest.importorskip('skimage')
OPTIONS = '--small', '--device', 'cpu', '--amp', 'float32', '--repeats', '1', '--out', 'out.csv'
LATENCY = 'stock', 'stock with our parts', 'deploy form'
FORMS = {
    **dict.fromkeys(('retinanet', 'mask_rcnn', 'upernet', 'backbone', 'one_image'), LATENCY),
    'narrow': (*LATENCY[:2], 'FFNs 0.2, heads a quarter'),
    'norms': ('stock with our parts', 'stock with our parts, stock LayerNorms'),
    **dict.fromkeys(('train_retinanet', 'train_mask_rcnn'), ('stock', 'literal', 'folded', 'auto')),
    'compiled': ('stock', 'deploy form', 'stock, compiled', 'deploy form, compiled'),
    'graphs': ('stock', 'deploy form', 'stock, CUDA graphs', 'deploy form, CUDA graphs'),
    'search': 3 * tuple(f'{name}, PyTorch' for name in ('stock', 'faster parts', '40 %')),
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(*parts):
        monkeypatch.setattr(sys, 'argv', ['on_a_gpu', *OPTIONS, '--parts', *parts])
        on_a_gpu.main()

    return call


# They take the way of another part, with other arguments.
LIKE_ANOTHER = 'mask_rcnn', 'upernet', 'one_image', 'graphs', 'train_retinanet'


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

    modes = []
    monkeypatch.setattr(on_a_gpu, 'train', train)
    monkeypatch.setattr(parts, 'refine', lambda fit, *_: fit)
    monkeypatch.setattr(nn.Module, 'compile', lambda _, mode: modes.append(mode))
    monkeypatch.setattr(bench, 'installed_formats', lambda _: ([EAGER], []))
    run(part)
    rows = tables.read('out.csv')
    assert tuple(row['form'] for row in rows) == FORMS[part]
    assert all(float(row['value']) > 0 for row in rows if row['unit'])
    assert {row['command'] for row in rows} == {'python -m benchmarks.on_a_gpu'}
    assert {row['cpu'] for row in rows} == {'CPU'}
    mode = {'compiled': None, 'graphs': 'reduce-overhead'}
    assert set(modes) == ({mode[part]} if part in mode else set())


def test_a_part_that_fails_or_hangs_does_not_stop_the_rest(run, monkeypatch, capsys):
    commands = []

    def one(command, check, timeout):
        assert check and 0 < timeout <= 600
        commands.append(command)
        if len(commands) == 1:
            raise subprocess.TimeoutExpired('retinanet', timeout)
        if len(commands) == 2:
            raise subprocess.CalledProcessError(1, 'upernet')

    monkeypatch.setattr(on_a_gpu, 'show_machine', lambda: None)
    monkeypatch.setattr(subprocess, 'run', one)
    run('retinanet', 'upernet', 'graphs')
    assert [command[-2:] for command in commands] == [
        ['--parts', name] for name in ('retinanet', 'upernet', 'graphs')
    ]
    out = capsys.readouterr().out
    assert 'retinanet is left out (TimeoutExpired)' in out and 'graphs ran' in out
    assert 'upernet is left out (CalledProcessError)' in out
