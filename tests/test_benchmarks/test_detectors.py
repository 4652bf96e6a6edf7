"""The times of detectors beside others, with tiny models of ours and a stand-in for another."""

import csv
import sys

import pytest
import torch

from repa_mm.export.exporter import to_onnx
from repa_mm.io.files import write_bytes
from repa_mm.search.formats import EAGER, F32, ORT

pytest.importorskip('mmdet')
pytest.importorskip('openvino')
detectors = pytest.importorskip('benchmarks.detectors')


class Other(torch.nn.Module):
    def forward(self, image):
        return image.mean((2, 3)), image.amax((2, 3))


def other(folder):
    """As the functions of `detectors.RIVALS`."""
    file = f'{folder}/other.onnx'
    write_bytes(file, to_onnx(Other(), (torch.rand(1, 3, 32, 32),)))
    return Other(), lambda *found: [x.argmax(1) for x in found], file, 32


@pytest.mark.slow
def test_times_of_all_ways_and_published_aps(tmp_path, monkeypatch, capsys):
    configs = [f'demo/retinanet_{name}_digits.py' for name in ('swin', 'repa_swin')]
    monkeypatch.setattr(detectors, 'OURS', {'ours': configs})
    monkeypatch.setattr(detectors, 'RIVALS', {'other': other})
    monkeypatch.setattr(detectors, 'PUBLISHED', {'other': (12.3, 'themselves')})
    options = ['--repeats', '2', '--work-dir', str(tmp_path), '--formats', EAGER, ORT, F32]
    monkeypatch.setattr(sys, 'argv', ['detectors', *options])
    detectors.main()
    with open(tmp_path / 'results.csv', encoding='utf-8') as file:
        rows = list(csv.DictReader(file))
    times = {(row['model'], row['form']) for row in rows if row['what'] == 'detectors: time'}
    forms = {'ours': detectors.FORMS, 'other': ['stock']}
    kinds = EAGER, ORT, F32
    assert times == {(m, f'{form}, {kind}') for m in forms for form in forms[m] for kind in kinds}
    assert all(float(row['value']) > 0 and row['unit'] == 'ms' for row in rows[:-1])
    assert rows[-1]['command'] == 'themselves' and rows[-1]['value'] == '12.3'
    assert 'other' in capsys.readouterr().out
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob('ours*')}
    monkeypatch.setattr(
        sys, 'argv', ['detectors', *options, '--models', 'ours', '--ways', f'narrow, {ORT}']
    )
    capsys.readouterr()
    detectors.main()  # with what is there
    said = capsys.readouterr().out
    assert f'ours, narrow, {ORT}: ready' in said and said.count('ready') == 1
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.glob('ours*')}
