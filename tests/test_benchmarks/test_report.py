"""A run of tools/speed_up.py becomes rows of results.csv, which replace those of another run."""

import json
import shutil

import pytest

from benchmarks import report, tables

RESULTS = dict(
    metric='coco/bbox_mAP',
    config='/somewhere/swin.py',
    checkpoint='/somewhere/swin.pth',
    images='100 images of data',
    rows=[
        dict(candidate='stock', format='PyTorch', ms=100, speedup=1, metric=50, interval=[0, 0],
             chosen=False),
        dict(candidate='40 %', format='OpenVINO f32', ms=20, speedup=5, metric=49.6,
             interval=[-0.82, 0.04], difference=-0.4, chosen=True),
        dict(candidate='20 %', format='OpenVINO f32', ms=25, speedup=4, metric=49.5,
             interval=[-0.9, 0.0], difference=-0.5, chosen=False),
    ],
)  # fmt: skip


def test_a_run_becomes_a_table(tmp_path, monkeypatch):
    path = tmp_path / 'results.csv'
    shutil.copy(tables.RESULTS, path)
    monkeypatch.setattr(tables, 'RESULTS', path)
    readme = report.WHAT, report.BESIDE
    before = len([row for row in tables.read() if not row['what'].startswith(readme)])
    for model in ('another', 'a model', 'a model'):  # README's run is replaced, and a second run
        report.write(list(report.to_csv(RESULTS, model, 'a CPU')), path, readme=True)
    rows = tables.read()
    assert len(rows) == before + 4 + 9
    assert {row['model'] for row in rows[before + 4 :]} == {'a model'}
    assert not any('/somewhere' in row['command'] for row in rows[before:])
    assert tables.tables()['speed_up'] == (
        '| | speedup | box AP | difference, 95 % |\n'
        '| --- | --- | --- | --- |\n'
        '| stock, PyTorch | 1.00 | 50.0 | |\n'
        '| 40 %, OpenVINO f32 | 5.00 | 49.6 | −0.82 to 0.04 |\n'
    )
    report.write(list(report.to_csv(RESULTS, 'a model', 'another CPU')), path)
    form = 'box AP, 40 % of the blocks, OpenVINO f32'
    assert tables.tables()['chosen'].splitlines()[-3:] == [
        f'| a model | a CPU | {form} | 5.00 | 50.0 | −0.40 | −0.82 to 0.04 |',
        f'| | another CPU | {form} | 5.00 | 50.0 | −0.40 | −0.82 to 0.04 |',
        f'| another | a CPU | {form} | 5.00 | 50.0 | −0.40 | −0.82 to 0.04 |',
    ]
    assert len(tables.read()) == before + 17


def test_the_picture_has_what_others_do(tmp_path, monkeypatch):
    (tmp_path / 'docs').mkdir()
    (tmp_path / 'results.json').write_text(json.dumps(RESULTS))
    tested = dict(interval=[-1, 1], format='OpenVINO f32')
    others = [('stock', 50, 1), ('ours: 40 %', 49.6, 4), ('NNCF: defaults', 44, 2)]
    others += [('Torch-Pruning: 50 %', 45, 1.6), ('Torch-Pruning: 5 %', 40, 3.2)]
    others = [dict(tested, candidate=n, metric=m, speedup=s) for n, m, s in others]
    (tmp_path / 'rivals.json').write_text(json.dumps(others))
    monkeypatch.setattr(tables, 'RESULTS', shutil.copy(tables.RESULTS, tmp_path / 'results.csv'))
    monkeypatch.setattr(tables, 'ROOT', tmp_path)
    drawn = []
    monkeypatch.setattr(report, 'scatter', lambda *args: drawn.extend(args) or '<svg>')
    monkeypatch.setattr('sys.argv', ['', f'{tmp_path}', '--model=a', '--cpu=b', '--readme'])
    report.main()
    rows, name, found = drawn
    assert rows[1].candidate == '40 %' and len(rows) == 3 and name == 'coco/bbox_mAP'
    # At a time relative to that of ours, which is 5 here and 4 there.
    assert found == {'NNCF': [(0.4, 44)], 'Torch-Pruning': [(0.5, 45), (0.25, 40)]}
    others[1]['candidate'] = 'ours: 20 %'  # another one was chosen then
    with pytest.raises(ValueError, match='beside 20 %, OpenVINO f32'):
        report.points(RESULTS['rows'], others)
    line = '| NNCF: defaults, OpenVINO f32 | 2.00 | 44.0 | −1.00 to 1.00 |\n'
    assert line in tables.tables()['rivals']
