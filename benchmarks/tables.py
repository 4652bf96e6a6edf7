"""The tables of the docs, from results.csv.

A page has a table between ``<!-- table: NAME -->`` and ``<!-- end -->``::

    python -m benchmarks.tables            # print all tables
    python -m benchmarks.tables --write    # write them into the pages

A row of results.csv is one measured value, or the range of several runs ('-45 to -39').
"""

import argparse
import csv
import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev

ROOT = Path(__file__).parents[1]
PAGES = 'README*.md', 'docs/*.md', 'benchmarks/README.md', 'projects/*/README.md'
RESULTS = Path(__file__).with_name('results.csv')
COLUMNS = 'what', 'model', 'form', 'run', 'cpu', 'command', 'version', 'date', 'value', 'unit'
BLOCK = re.compile(r'(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)', re.DOTALL)
HEADS = dict(cpu='CPU', keep='channels left')
SHOWN = 'RePa-Swin-T', 'RePa-Swin-S', 'RePa-Swin-B', 'RePa-DeiT-B'
SHAPES = {'RetinaNet': '800×1344', 'Mask R-CNN': '800×1344', 'UperNet': '512×512'}
XEON = 'Intel Xeon (AVX-512, AMX), 2 cores'
STOCK, OURS, DEPLOY = 'stock', 'stock with our parts', 'deploy form'
Row = dict[str, str]


def read(path: str | Path | None = None) -> list[Row]:
    """Return the rows of results.csv, or another such file, with fields for tables.

    'of' is what follows a colon in 'what'; 'method' and 'keep' are the parts of the form of a
    conversion ('CORP, weighted, 0.375').
    """
    with open(path or RESULTS, encoding='utf-8', newline='') as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row['of'] = row['what'].rpartition(': ')[2]
        method, _, keep = row['form'].rpartition(', ')
        row['method'], row['keep'] = (method, keep) if method else (keep, '')
    return rows


def grouped(rows: list[Row], *fields: str) -> dict[tuple[str, ...], list[Row]]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[field] for field in fields), []).append(row)
    return groups


def runs(rows: list[Row], form: str | None = None) -> dict[str, float]:
    return {row['run']: float(row['value']) for row in rows if form in (None, row['form'])}


def listed(rows: list[Row]) -> str:
    """The values of all runs."""
    return ', '.join(row['value'] for row in rows)


def with_units(rows: list[Row]) -> str:
    return ', '.join(f'{row["value"]} {row["unit"]}' for row in rows)


def mean(rows: list[Row], digits: int = 1) -> str:
    return f'{fmean(runs(rows).values()):.{digits}f}'


def change(form: str, reference: str) -> Callable[[list[Row]], str]:
    """The change of each run from one form to another, in percent."""

    def text(rows: list[Row]) -> str:
        found, base = runs(rows, form), runs(rows, reference)
        each = [f'{100 * (found[run] / base[run] - 1):+.0f}' for run in found if run in base]
        return ', '.join(each)

    return text


def difference(rows: list[Row], base: list[Row]) -> str:
    """Mean and standard deviation of the difference over runs of the same seed."""
    if rows[0]['form'] == base[0]['form']:
        return ''
    found, reference = runs(rows), runs(base)
    values = [found[run] - reference[run] for run in found]
    average = f'{fmean(values):+.1f}'
    average = average if float(average) else '0.0'
    return f'{average} ± {stdev(values):.1f}' if len(values) > 1 else average


def table(
    rows: list[Row],
    index: str,
    columns: str = '',
    cell: Callable[[list[Row]], str] = listed,
    extra: dict[str, Callable[[list[Row]], str]] | None = None,
) -> str:
    """Return a Markdown table.

    Args:
        rows (list): Rows of results.csv.
        index (str): Names of fields. Each combination of their values has a line.
        columns (str): Name of a field. Each of its values has a column, with its unit in the head
            if ``cell`` is :func:`listed`.
        cell (Callable): Returns the text for the rows of a cell.
        extra (dict, optional): More columns by their names, from the rows of a line.
    """
    if not rows:
        return ''
    extra, fields = extra or {}, index.split()
    by_column = grouped(rows, columns) if columns else {}
    heads = [HEADS.get(field, '') for field in fields]
    for (name,), found in by_column.items():
        unit = found[0]['unit'] if cell is listed else ''
        heads.append(f'{name}, {unit}' if unit else name)
    lines = [[*heads, *extra], ['---'] * (len(heads) + len(extra))]
    previous: tuple[str, ...] = ()
    for key, line in grouped(rows, *fields).items():
        cells = grouped(line, columns) if columns else {}
        shown = list(key)
        for i, (value, above) in enumerate(zip(key[:-1], previous)):
            if value != above:
                break
            shown[i] = ''
        previous = key
        found = [cell(cells[name]) if name in cells else '' for name in by_column]
        lines.append([*shown, *found, *(text(line) for text in extra.values())])
    text = '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines) + '\n'
    text = text.replace(', 2 cores |', ' |')  # which the pages say once
    return re.sub(r'(?<![\w.-])-(?=\d)', '−', text.replace('|  |', '| |').replace('|  |', '| |'))


def tables() -> dict[str, str]:
    """Return the Markdown of all tables, by name."""
    every = read()

    def of(prefix: str | tuple[str, ...], **fields: str | tuple[str, ...]) -> list[Row]:
        """The rows whose 'what' begins so, and whose fields have one of these values."""
        allowed = {key: (v,) if isinstance(v, str) else v for key, v in fields.items()}
        rows = [row for row in every if row['what'].startswith(prefix)]
        return [row for row in rows if all(row[key] in v for key, v in allowed.items())]

    fitted = 'after a conversion: '
    vit = 'DINOv2 ViT-S/14'
    detectors = 'RetinaNet, clothes', 'RetinaNet, digits', 'Mask R-CNN, digits', 'UperNet, digits'
    heads = of('channels and heads: ', model=detectors)
    keeps, methods = ('0.375', '0.1'), ('ours', 'CORP, weighted', 'GRAIL, Wanda')
    originals = of(fitted, form='original', model=detectors)
    lines = [dict(row, keep=keep) for row in originals for keep in keeps]
    lines += of(fitted, model=detectors, method=methods, keep=keeps)
    swins = [f'{model} Swin-B, {size}' for model, size in SHAPES.items()]
    swins.append('Swin-B backbone, 8×224×224')
    on_gpu = [f'{model} Swin-B, 8×{size}' for model, size in SHAPES.items()]
    on_gpu.append('Swin-B backbone, 64×224×224')
    merge = {'against stock, %': change(DEPLOY, STOCK), 'by the merge, %': change(DEPLOY, OURS)}

    def against(originals: list[Row]) -> Callable[[list[Row]], str]:
        """What is lost, from the original of the same model and metric."""
        base = grouped(originals, 'model', 'of')
        return lambda rows: difference(rows, base[rows[0]['model'], rows[0]['of']]) or mean(rows)

    def in_brackets(rows: list[Row]) -> str:
        """The deploy form's value, and that of the stock model in brackets."""
        values = {row['form']: row['value'] for row in rows}
        return values[DEPLOY] + (f' ({values[STOCK]})' if STOCK in values else '')

    sizes = {'RetinaNet Swin-T': 'RetinaNet', 'Mask R-CNN Swin-T': 'Mask R-CNN'}
    sizes['RetinaNet Swin-B'] = 'RetinaNet'
    shown = dict(method=(STOCK, 'merged'), keep=('PyTorch', 'OpenVINO bf16'))
    both = of('detectors: time', model=tuple(sizes), **shown)
    both = [dict(row, model=f'{row["model"]}, {SHAPES[sizes[row["model"]]]}') for row in both]
    upernet = of('latency', of='latency', model=swins[2], form=(STOCK, DEPLOY), cpu=XEON)
    both += [dict(row, method=row['form'], keep='PyTorch') for row in upernet]

    def of_stock(rows: list[Row]) -> str:
        stock, merged = (values for _, values in sorted(grouped(rows, 'method').items())[::-1])
        return f'{float(mean(merged, 3)) / float(mean(stock, 3)):.2f}'

    graphs = []
    for row in of('GPU latency with CUDA graphs: '):
        form, _, ways = row['form'].partition(', ')
        graphs.append(dict(row, form=form, launched='from ' + ('a graph' if ways else 'Python')))

    def of_authors(rows: list[Row]) -> str:
        found = of('detectors: published', model=rows[0]['model'])
        return listed(found) if rows[0]['method'] == STOCK else ''

    pretraining = of('after pretraining: ')
    pretraining = [dict(row, name=f'{row["model"]}, {row["of"]}') for row in pretraining]

    def gained(rows: list[Row]) -> str:
        stock, repa = (grouped(rows, 'form')[form,] for form in ('stock', 'RePa'))
        return difference(repa, stock)

    return {
        # A run of tools/speed_up.py: four of the rows in README's picture.
        'speed_up': table(
            [row for row in of('speed-up: ') if row['form'][:4] not in ('85 %', '70 %')],
            'form',
            'of',
        ),
        'rivals': table(of('beside others: '), 'form', 'of'),
        'chosen': table(
            sorted(of('chosen: '), key=lambda row: row['model']), 'model cpu form', 'of'
        ),
        'gains': table(both, 'model', 'keep', of_stock),
        'latency': table(
            of('latency', of='latency', model=(*swins, 'DINO-4scale ResNet-50, 800×1344')),
            'model cpu',
            'form',
            lambda rows: mean(rows, 0),
            merge,
        ),
        'gpu': table(of('GPU latency: ', model=tuple(on_gpu)), 'model', 'form', listed, merge),
        'gpu-graphs': table(graphs, 'model launched', 'form', listed, merge),
        'gpu-training': table(of('GPU training step: '), 'model form', 'of'),
        'paper': table(of("the paper's table 2: "), 'model', 'form'),
        'training': table(of('training step: '), 'model form', 'of'),
        'complexity': table(
            of(('parameters', 'multiply-adds'), model=SHOWN), 'model', 'form', with_units
        ),
        'accuracy': table(
            of('after 3 epochs: ', form=('stock', 'RePa')),
            'model of',
            'form',
            mean,
            {'RePa minus stock': gained},
        ),
        'dense-prediction': table(of("AP or mIoU, the paper's"), 'model', 'form'),
        'conversion': table(lines, 'model of keep', 'method', against(originals)),
        'heads': table(
            heads, 'model of', 'form', against([r for r in heads if r['form'] == 'original'])
        ),
        'narrow-files': table(of('file in OpenVINO, '), 'form', 'of'),
        'ways': table(of('fine-tuned: '), 'model form', 'of', mean),
        'fitted': table(of('fitted: '), 'model form', 'of', mean),
        'pretraining': table(
            pretraining,
            'form',
            'name',
            lambda rows: f'{mean(rows)} ({listed(rows)})' if len(rows) > 1 else listed(rows),
        ),
        'trees': table(of('trees: '), 'form', 'of'),
        'trees-narrow': table(of('trees narrow: '), 'form', 'of'),
        'trees-further': table(of('trees further: '), 'form', 'of'),
        'saliency': table(of('saliency: '), 'form', 'of'),
        'detectors': table(
            of('detectors: time'),
            'model method',
            'keep',
            lambda rows: mean(rows, 0),
            {'box AP, as published': of_authors},
        ),
        'dinov2': table(of(fitted, model=vit, keep=('', '0.375')), 'method', 'of'),
        'exported': table(of('times as fast as stock PyTorch: '), 'model cpu', 'of', in_brackets),
        'bounds': table(of('worst relative error: '), 'form', 'of'),
    }


def filled(text: str) -> str:
    """Return a page with its tables as results.csv has them."""
    found = tables()
    return BLOCK.sub(lambda match: match[1] + found[match[2]] + match[3], text)


def pages() -> list[Path]:
    return sorted(path for pattern in PAGES for path in ROOT.glob(pattern))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--write', action='store_true')
    if parser.parse_args().write:
        for page in pages():
            page.write_text(filled(page.read_text(encoding='utf-8')), encoding='utf-8')
    else:
        for name, text in tables().items():
            print(f'{name}\n\n{text}')


if __name__ == '__main__':
    main()
