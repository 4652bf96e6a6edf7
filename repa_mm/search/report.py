"""The table and the picture of what was measured."""

import base64
import copy
import html
import io
import math
import os.path as osp

import cv2
import mmcv
import torch.nn as nn
from matplotlib import rc_context, ticker
from matplotlib.figure import Figure
from mmengine.config import Config
from mmengine.registry import VISUALIZERS

from repa_mm.io.files import write_text
from repa_mm.search.formats import FORMATS
from repa_mm.search.judge import Judge

COLUMNS = (
    'candidate', 'format', 'ms', '95th percentile', '× stock [95 %]', '{}', 'difference [95 %]',
    'size, MB', '',
)  # fmt: skip
NUM_PICTURES = 4
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Speed</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: auto; padding: 0 1rem }
div { overflow-x: auto } svg { width: 100%; height: auto } img { width: 49% }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap }
</style>
"""


def table(results: dict) -> tuple[list[str], list[list[str]]]:
    """Return the head and the formatted rows. '≈' precedes a test of another format."""
    lines = []
    for row in results['rows']:
        least, most = row['speedup_interval']
        line = [row['candidate'], row['format'], f'{row["ms"]:.1f}', f'{row["ms_p95"]:.1f}']
        line += [f'{row["speedup"]:.2f} [{least:.2f}, {most:.2f}]', '', '']
        if row['metric'] is not None:
            about = '' if row['tested_in'] == row['format'] else '≈ '
            bounds = ', '.join(f'{x:+.2f}' for x in row['interval'])
            line[-2:] = f'{about}{row["metric"]:.2f}', f'{about}{row["difference"]:+.2f} [{bounds}]'
        lines.append([*line, f'{row["mb"]:.1f}', 'chosen' if row['chosen'] else ''])
    return [column.format(results['metric'] or 'metric') for column in COLUMNS], lines


def title(results: dict) -> str:
    """Return what the table is of."""
    where = results['environment'].get('GPU', results['environment']['CPU'])
    return f'{results["config"]}, {results["timed"]} in turn on {where}, {results["images"]}'


def notes(results: dict) -> list[str]:
    """Return what a reader should know of the table, and what was left out."""
    found, rows = list(results['notes']), results['rows'][1:]
    if any(row['tested_in'] != row['format'] for row in rows if row['tested_in']):
        found.append('≈: tested in another format, which finds the same in an image.')
    if results['metric'] == 'agreement':
        found.append('Agreement compares with what the original finds, which need not be true.')
    if results['target'] and not any(row['chosen'] for row in rows):
        found.append(
            f'Nothing {results["target"]}: nothing is chosen, and files of an earlier choice stay.'
        )
    return found


def scatter(rows: list[dict], name: str, others: dict | None = None) -> str:
    """Draw times against the metric as SVG. Without tests, the axis of the metric is the size.

    ``others`` has points of what the search does not try, by its name.
    """
    key = 'metric' if any(row['metric'] is not None for row in rows) else 'mb'
    # Of the same turns, as in the table: the machine may have been slower in those of other rows.
    rows = [dict(row, at=(1 / row['speedup'], row[key])) for row in rows if row[key] is not None]
    with rc_context({'svg.fonttype': 'none', 'font.size': 11, 'font.family': 'sans-serif'}):
        figure = Figure(figsize=(6.6, 4.6), layout='constrained')
        axes = figure.subplots()
        xlabel, ylabel = 'time / time of stock', name if key == 'metric' else 'MB'
        axes.set(xscale='log', xlabel=xlabel, ylabel=ylabel, axisbelow=True)
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7)))
        axes.xaxis.set(major_formatter='{x:g}', minor_locator=ticker.NullLocator())
        axes.grid(color='#e4e4e4')
        axes.margins(0.15, 0.3)
        for kind in FORMATS:
            found = [row['at'] for row in rows[1:] if row['format'] == kind]
            if found:
                axes.plot(*zip(*found), 'o', label=kind, markersize=5)
        # The model itself and the chosen one stand out; other candidates are named once each.
        shown = [row for i, row in enumerate(rows) if row['chosen'] or not i]
        for row in shown:
            marker = dict(fillstyle='none', markersize=13) if row['chosen'] else dict(markersize=9)
            axes.plot(*row['at'], 'o' if row['chosen'] else 's', color='#222', **marker)
            texts = ['chosen'] * row['chosen'] + [row['candidate'], f'{row["speedup"]:.2f} ×']
            at = dict(xytext=(0, -11), textcoords='offset points', ha='center', va='top')
            axes.annotate('\n'.join(texts), row['at'], weight='bold', **at)
        for row in shown[1:]:
            arrow = dict(arrowstyle='->', color='#999', shrinkB=9)
            axes.annotate('', row['at'], shown[0]['at'], arrowprops=arrow)
        ordered = sorted(rows[1:], key=lambda row: row['speedup'])
        named = {row['candidate']: row['at'] for row in ordered}  # where each is fastest
        for row in shown:
            named.pop(row['candidate'], None)
        groups = {}  # names of what lies too close for a name each
        for candidate, (x, y) in named.items():
            place = round(8 * math.log(x)), y
            groups.setdefault(place, ((x, y), []))[1].append(candidate)
        for at, names in groups.values():
            beside = dict(xytext=(1, 4), textcoords='offset points', rotation=35)
            axes.annotate(', '.join(names), at, fontsize=9, **beside)
        for marker, (tool, found) in zip('x+*d', (others or {}).items()):
            axes.plot(*zip(*found), marker, color='#777', label=tool)
        figure.legend(loc='outside upper left', ncols=3, frameon=False)
        text = io.StringIO()
        figure.savefig(text, format='svg', metadata={'Date': None})
    return text.getvalue()[text.getvalue().index('<svg') :]


def _pictures(cfg: Config, models: list[nn.Module], judge: Judge) -> list[str]:
    """Draw what models find in images, with the codebase's visualizer, as data URIs."""
    meta = getattr(judge.dataset, 'metainfo', None) or models[0].dataset_meta
    drawing = VISUALIZERS.build(dict(cfg.visualizer, vis_backends=None, name=f'{id(models)}'))
    drawing.dataset_meta, found = meta, []
    for data in judge.images(NUM_PICTURES):
        for model in models:
            (sample,) = model.test_step(copy.deepcopy(data))
            image = mmcv.imread(sample.img_path, channel_order='rgb')
            if hasattr(drawing, 'visualize_cls'):
                drawing.visualize_cls(image, sample, meta.get('classes'), draw_gt=False)
            else:
                drawing.add_datasample('image', image, sample.cpu(), draw_gt=False)
            picture = mmcv.imrescale(drawing.get_image()[..., ::-1], min(1, 960 / image.shape[1]))
            _, jpeg = cv2.imencode('.jpg', picture, [cv2.IMWRITE_JPEG_QUALITY, 88])
            found.append(f'data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}')
    return found


def write_report(
    path: str, cfg: Config, results: dict, shown: dict, models: list[nn.Module], judge: Judge
) -> None:
    """Write everything into one HTML file '….html' that needs no other, and its picture, '….svg'.

    ``cfg`` is that of the original, ``results`` the content of ``results.json``. What ``models``
    find is drawn: the original, and the model of the row ``shown``.
    """
    name = html.escape(f'{shown["candidate"]}, {shown["format"]}')
    picture = scatter(results['rows'], results['metric'])
    head, rows = table(results)
    lines = (('th', head), *(('td', row) for row in rows))
    versions = ', '.join(f'{name} {x}' for name, x in results['environment'].items())
    cells = [[f'<{tag}>{html.escape(x)}</{tag}>' for x in line] for tag, line in lines]
    page = [
        f'<h1>{html.escape(osp.basename(results["config"]))}: how much faster, at what cost</h1>',
        f'<p>Chosen: {name}, which {results["target"]}.' * shown['chosen'], picture,
        *(f'<p>{html.escape(text)}' for text in (title(results), *notes(results), versions)),
        f'<div><table><tr>{"<tr>".join(map("".join, cells))}</table></div>',
        f'<h2>What stock (left) and {name} (right) find</h2>',
    ]  # fmt: skip
    page += [f'<img src="{uri}" alt="">' for uri in _pictures(cfg, models, judge)]
    write_text(f'{osp.splitext(path)[0]}.svg', picture)
    write_text(path, PAGE + '\n'.join(page))
