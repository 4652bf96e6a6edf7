"""The tables of the docs, from results.csv.

A page of the docs has a table between ``<!-- table: NAME -->`` and ``<!-- end -->``::

    python -m benchmarks.tables            # print all tables
    python -m benchmarks.tables --write    # write them into the pages

A row of results.csv is one measured value, or a range of several runs ('-45 to -39').
"""

import csv
import datetime
import re
import sys
from pathlib import Path

import repa_mm

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name('results.csv')
COLUMNS = 'what', 'model', 'form', 'run', 'cpu', 'command', 'version', 'date', 'value', 'unit'
Row = dict[str, str]
BLOCK = re.compile(r'(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)', re.DOTALL)


def read() -> list[Row]:
    with open(RESULTS, encoding='utf-8', newline='') as file:
        return list(csv.DictReader(file))


def append(path: str, **values: str) -> None:
    """Append a row to a file: of this command, version and month, unless ``values`` say else."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    is_new = not file.exists()
    known = dict(
        command=' '.join(['python -m benchmarks.' + Path(sys.argv[0]).stem, *sys.argv[1:]]),
        version=repa_mm.__version__,
        date=f'{datetime.date.today():%Y-%m}',
    )
    with open(file, 'a', encoding='utf-8', newline='') as out:
        writer = csv.DictWriter(out, COLUMNS, lineterminator='\n')
        if is_new:
            writer.writeheader()
        writer.writerow({**known, **values})
