r"""Put a run of tools/speed_up.py into results.csv.

Its chosen model becomes a row of the table in docs/benchmarks.md. With ``--readme`` the whole run
takes the place of README's, and its picture that of docs/speed_up.svg. What `benchmarks/rivals.py`
found there is in the picture, too, and in the table of docs/alternatives.md::

    python tools/speed_up.py CONFIG CHECKPOINT OUT_DIR --max-loss 0.5
    python -m benchmarks.report OUT_DIR --model 'RetinaNet, digits' --cpu 'Intel Xeon, 2 cores' \
        --options='--max-loss 0.5' --readme
    python -m benchmarks.tables --write
"""

import argparse
import csv
import datetime
import json
import os.path as osp
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from benchmarks import tables
from repa_mm.io.files import replacing, write_text
from repa_mm.search.report import scatter, short
from repa_mm.search.rows import Row
from repa_mm.version import __version__

WHAT, CHOSEN, BESIDE = 'speed-up: ', 'chosen: ', 'beside others: '


def to_csv(
    results: dict, model: str, cpu: str, options: str = '', others: list[dict] | None = None
) -> Iterator[dict[str, str]]:
    """Yield rows for results.csv from the content of a run's ``results.json``.

    Each candidate has those of its fastest format, unless a wider one is faster, and the chosen
    model has some by itself. ``others`` is the content of ``rivals.json``.
    """
    name = short(results['metric'])
    config, checkpoint = (osp.basename(results[key]) for key in ('config', 'checkpoint'))
    fixed = dict(
        model=model, run=results['images'].split(' images')[0] + ' images', cpu=cpu,
        command=f'python tools/speed_up.py {config} {checkpoint} OUT_DIR {options}'.rstrip(),
        version=__version__,
        date=f'{datetime.date.today():%Y-%m}',
    )  # fmt: skip
    shown = results['rows'][:1]
    for _, rows in groupby(results['rows'][1:], lambda row: row['candidate']):  # wide to narrow
        row = max(rows, key=lambda row: row['speedup'])
        if row['speedup'] > shown[-1]['speedup']:
            shown.append(row)
    beside = dict(what=BESIDE, command='python -m benchmarks.rivals OUT_DIR')
    rivals = [dict(row, **beside) for row in others or ()]
    for row in [dict(row, what=WHAT) for row in shown] + rivals:
        values = {'speedup': f'{row["speedup"]:.2f}'}  # times of other turns do not compare
        if row['metric'] is not None:
            values[name] = f'{row["metric"]:.1f}'
        if row['interval'] is not None and any(row['interval']):
            low, high = (round(x, 2) + 0.0 for x in row['interval'])  # without a negative zero
            values['difference, 95 %'] = f'{low:.2f} to {high:.2f}'
        for what, value in values.items():
            form = f'{row["candidate"]}, {row["format"]}'
            command = row.get('command', fixed['command'])
            fields = dict(what=row['what'] + what, form=form, command=command, value=value, unit='')
            yield {**fixed, **fields}
    stock, row = results['rows'][0], next((r for r in results['rows'] if r['chosen']), None)
    if row and row['interval']:
        low, high = (round(x, 2) + 0.0 for x in row['interval'])
        values = {
            'speedup': f'{row["speedup"]:.2f}',
            'metric of the original': f'{stock["metric"]:.1f}',
            'difference': f'{row["difference"]:.2f}',
            '95 %': f'{low:.2f} to {high:.2f}',
        }
        form = f'{name}, {row["candidate"]} of the blocks, {row["format"]}'
        for what, value in values.items():
            yield dict(fixed, what=CHOSEN + what, form=form, value=value, unit='')


def write(rows: list[dict[str, str]], path: Path, readme: bool = False) -> None:
    """Replace the rows of the same model on the same processor, or those of README's run."""
    rows = [row for row in rows if readme or row['what'].startswith(CHOSEN)]
    models = {(row['model'], row['cpu']) for row in rows}
    kept = [
        row for row in tables.read(path)
        if not (row['what'].startswith(CHOSEN) and (row['model'], row['cpu']) in models)
        and not (row['what'].startswith((WHAT, BESIDE)) and readme)
    ]  # fmt: skip
    with replacing(str(path)) as temporary, open(temporary, 'w', encoding='utf-8') as file:
        writer = csv.DictWriter(file, tables.COLUMNS, extrasaction='ignore', lineterminator='\n')
        writer.writeheader()
        writer.writerows([*kept, *rows])


def points(rows: list[dict], others: list[dict]) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each tool of ``rivals.json`` in the picture.

    Times are relative to that of the chosen model, which both runs have.

    Raises:
        ValueError: If the run has chosen another model since.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    if not others:
        return found
    ours, chosen = others[1], next((row for row in rows if row['chosen']), None)
    name = ours['candidate'].removeprefix('ours: ')
    if chosen is None or (name, ours['format']) != (chosen['candidate'], chosen['format']):
        raise ValueError(
            f'rivals.json is beside {name}, {ours["format"]}, which is not chosen any more: '
            'run benchmarks.rivals anew'
        )
    for row in others[2:]:  # after the original and the chosen model
        scale = chosen['speedup'] / ours['speedup']
        tool = row['candidate'].partition(':')[0]
        found.setdefault(tool, []).append((1 / (scale * row['speedup']), row['metric']))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('out_dir', help='folder of a run of tools/speed_up.py')
    parser.add_argument('--model', required=True, help='name of the model')
    parser.add_argument('--cpu', required=True, help='the processor, in plain words')
    parser.add_argument('--options', default='', help='the options of the run')
    parser.add_argument('--readme', action='store_true', help="let it be README's run")
    args = parser.parse_args()
    results = json.loads((Path(args.out_dir) / 'results.json').read_text(encoding='utf-8'))
    path = Path(args.out_dir) / 'rivals.json'
    others = json.loads(path.read_text(encoding='utf-8')) if args.readme and path.exists() else []
    rows = list(to_csv(results, args.model, args.cpu, args.options, others))
    write(rows, tables.RESULTS, args.readme)
    if args.readme:
        found, rows = points(results['rows'], others), [Row(**row) for row in results['rows']]
        picture = scatter(rows, results['metric'], found)
        write_text(str(tables.ROOT / 'docs' / 'speed_up.svg'), picture)


if __name__ == '__main__':
    main()
