"""The command lines of what measures."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys

import pytest

import repa_mm

from .test_end_to_end import ROOT, run_tool

pytest.importorskip('mmdet')
REPA = repa_mm.config_path('demo/retinanet_repa_swin_digits.py')
VANILLA = repa_mm.config_path('demo/retinanet_swin_digits.py')
TOOLS = ('benchmark', 'benchmark_training', 'profile_latency', 'get_flops')


def test_benchmark(tmp_path):
    result = run_tool(
        ROOT / 'tools/benchmark.py',
        REPA,
        '--baseline',
        VANILLA,
        '--synthetic',
        '64x64',
        '--num-images',
        5,
        '--warmup',
        1,
        '--threads',
        1,
        '--out',
        'out.json',
        '--plot',
        'out.png',
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert re.search(r'deploy( +\| +[\d.]+){4}', result.stdout)
    assert '5/5 images' in result.stderr
    saved = json.loads((tmp_path / 'out.json').read_text())
    assert saved['environment']['threads'] == 1
    assert '--baseline' in saved['environment']['command']
    assert (tmp_path / 'out.png').exists()


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_interrupted_benchmark_reports(number, tmp_path):
    process = subprocess.Popen(
        [
            sys.executable,
            ROOT / 'tools/benchmark.py',
            REPA,
            '--synthetic',
            '64x64',
            '--num-images',
            '100000',
            '--warmup',
            '1',
            '--out',
            'out.json',
            '--sweep',
            'batch=1,2',
            '--no-memory',
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(),
    )
    for line in process.stderr:
        if 'warm-up 1/1' in line:
            break
    # Measuring has begun; a moment later there are some images.
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(3)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err[-2000:]
    assert 'Interrupted: this is what was measured until then' in out
    saved = json.loads((tmp_path / 'out.json').read_text())
    assert saved['interrupted']
    (run,) = saved['points']
    assert 0 < run['count'] < 100000
    assert len(run['forms']['deploy']['raw']['total']) == run['count']


def _environment():
    return dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1')


def run_here(monkeypatch, tool, *arguments):
    """Run a tool in this process, which has imported everything already."""
    path = str(ROOT / f'tools/{tool}.py')
    monkeypatch.setattr(sys, 'argv', [path, *map(str, arguments)])
    try:
        runpy.run_path(path, run_name='__main__')
    except SystemExit as error:
        return error.code
    return 0


@pytest.mark.parametrize(
    'arguments, expected',
    [
        (['get_flops', REPA, '--part', 'backbone', '--shape', 64], 'GMACs'),
        (
            ['profile_latency', VANILLA, REPA, '--size', '64x64', '--num-images', 2, '--warmup', 0],
            'share of FFN',
        ),
        (
            [
                'benchmark_training',
                REPA,
                '--size',
                '64x64',
                '--steps',
                1,
                '--warmup',
                0,
                '--batch-size',
                1,
                '--optimizer',
                'none',
                '--paths',
                'auto',
            ],
            'saved activations',
        ),
    ],
)
def test_other_tools(arguments, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_here(monkeypatch, *arguments, '--out', 'out.json') == 0
    assert expected in capsys.readouterr().out
    assert json.loads((tmp_path / 'out.json').read_text())


@pytest.mark.parametrize('tool', TOOLS)
def test_help_and_errors(tool, monkeypatch, capsys):
    assert run_here(monkeypatch, tool, '--help') == 0
    assert 'examples:' in capsys.readouterr().out
    # A text as the exit code: Python prints it and exits with 1.
    message = run_here(monkeypatch, tool, 'none.py')
    assert message.startswith("error: no config at 'none.py'")
    assert len(message.splitlines()) == 1
