"""The docs have the tables that results.csv gives, and the file is tidy."""

import re
from collections import Counter

import pytest

from benchmarks import tables


@pytest.fixture
def results(monkeypatch, tmp_path):
    """Write rows of (what, model, form, run, value, unit) in the place of results.csv."""

    def write(*rows):
        lines = [','.join(tables.COLUMNS)]
        lines += [f'{a},{b},{c},{run},,,,,{value},{unit}' for a, b, c, run, value, unit in rows]
        (tmp_path / 'results.csv').write_text('\n'.join(lines))
        monkeypatch.setattr(tables, 'RESULTS', tmp_path / 'results.csv')
        return tables.read()

    return write


@pytest.mark.parametrize('page', tables.pages(), ids=lambda page: page.name)
def test_pages_have_the_tables(page):
    text = page.read_text(encoding='utf-8')
    assert text == tables.filled(text), 'run python -m benchmarks.tables --write'


def test_every_table_is_in_one_page():
    pages = '\n'.join(
        page.read_text(encoding='utf-8')
        for page in tables.pages()
        if page.name != 'README_zh-CN.md'  # a translation
    )
    names = Counter(name for _, name, _ in tables.BLOCK.findall(pages))
    assert names == Counter(tables.tables().keys())


def test_rows_are_tidy():
    rows = tables.read()
    keys = tables.grouped(rows, 'what', 'model', 'form', 'run', 'cpu')
    assert [key for key, group in keys.items() if len(group) > 1] == []
    number = r'-?\d+(\.\d+)?(e-\d+)?'
    for row in rows:
        assert re.fullmatch(f'{number}( (to|±) {number})?', row['value']), row
        assert re.fullmatch(r'0\.\d(\.\d)?', row['version']) or row['version'].endswith("'s"), row
        assert re.fullmatch(r'(20\d\d-\d\d)?', row['date']), row
        assert row['what'] and row['model'] and row['form'], row


def test_a_table_with_changes(results):
    rows = [('latency', 'a', 'stock', 1, 100, 'ms'), ('latency', 'a', 'stock', 2, 110, 'ms')]
    rows += [('latency', 'a', 'deploy form', 1, 60, 'ms'), ('latency', 'b', 'stock', 1, 5, 'ms')]
    extra = {'change': tables.change('deploy form', 'stock')}
    assert tables.table(results(*rows), 'model', 'form', extra=extra) == (
        '| | stock, ms | deploy form, ms | change |\n'
        '| --- | --- | --- | --- |\n'
        '| a | 100, 110 | 60 | −40 |\n'
        '| b | 5 | | |\n'
    )


def test_differences_pair_the_runs_of_a_seed(results):
    rows = results(
        *[('AP', 'a', 'original', seed, value, '') for seed, value in ((0, 50), (1, 60))],
        *[('AP', 'a', 'ours', seed, value, '') for seed, value in ((1, 56), (0, 49))],
    )
    assert tables.difference(rows[2:], rows[:2]) == '-2.5 ± 2.1'
    assert tables.difference(rows[:2], rows[:2]) == ''
