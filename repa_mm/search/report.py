"""The table, the pictures and the pages of what was measured."""

import base64
import copy
import html
import io
import itertools
import math
import os.path as osp
from collections.abc import Sequence
from dataclasses import fields

import cv2
import mmcv
import numpy as np
import torch.nn as nn
from matplotlib import rc_context, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from mmengine.config import Config
from mmengine.registry import VISUALIZERS

from repa_mm.io.files import write_text
from repa_mm.measure.timing import formatted
from repa_mm.search.formats import FORMATS
from repa_mm.search.judge import METRICS, Judge
from repa_mm.search.rows import Row

NUM_PICTURES = 4
#: Points of the metric in which two models are the same.
NOISE = 2
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Speed</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: auto; padding: 0 1rem }
div { overflow-x: auto } svg { width: 100%; height: auto } img { width: 49% }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap }
</style>
"""


def short(metric: str) -> str:
    """Return a metric's short name."""
    return METRICS.get(metric, [metric or 'metric'])[0]


def table(rows: Sequence[Row], metric: str, wide: bool = True) -> tuple[list[str], list[list[str]]]:
    """Return the head and the formatted rows, unless ``wide`` without the columns of reports."""
    columns = [one for one in fields(Row) if one.metadata['head']]
    columns = [one for one in columns if wide or not one.metadata['wide']]
    lines = [
        ['' if getattr(row, c.name) is None else c.metadata['show'].format(row) for c in columns]
        for row in rows
    ]
    return [one.metadata['head'].format(short(metric)) for one in columns], lines


def gain(row: Row, metric: str) -> str:
    """Return how fast the model of a row is, and what it costs."""
    found = f'{row.name}, {row.speedup:.2f} × as fast'
    if row.interval:
        low, high = row.interval
        found += f', {row.difference:+.2f} {short(metric)} [{low:.2f}, {high:.2f}]'
    return found


def title(results: dict) -> str:
    """Return what the table is of."""
    where = results['environment'].get('GPU', results['environment']['CPU'])
    return f'{results["config"]}, {results["timed"]} in turn on {where}, {results["images"]}'


def notes(results: dict, rows: Sequence[Row]) -> list[str]:
    """Return what a reader should know of the table, and what was left out."""
    found = list(results['notes'])
    if any(row.tested_in not in (None, row.format) for row in rows):
        found.append('≈: tested in another format, which finds the same in an image.')
    if results['metric'] == 'agreement':
        found.append('Agreement compares with what the original finds, which need not be true.')
    if results['target'] and not any(row.chosen for row in rows):
        found.append(
            f'Nothing {results["target"]}: nothing is chosen, and files of an earlier choice stay.'
        )
    return found


def headline(rows: Sequence[Row], name: str) -> str:
    """Return the result in words: what the chosen row, or else the fastest one, gains and costs."""
    row = next((r for r in rows if r.chosen), None) or max(rows, key=lambda r: r.speedup)
    fast = f'{row.speedup:.1f} × as fast'
    if not row.interval:
        return fast
    low, high = row.interval
    if low <= 0 <= high and max(-low, high) <= NOISE:
        return f'The same {name}, {fast}'
    return f'{row.difference:+.1f} {name} [{low:.1f}, {high:.1f}], {fast}'


def scatter(rows: Sequence[Row], metric: str, others: dict | None = None) -> str:
    """Draw times against the metric as SVG. Without tests, the axis of the metric is the size.

    ``others`` has points of what the search does not try, by its name.
    """
    is_tested, name = any(row.metric is not None for row in rows), short(metric)
    # Of the same turns, as in the table: the machine may have been slower in those of other rows.
    points = [(row, (1 / row.speedup, row.metric if is_tested else row.mb)) for row in rows]
    points = [(row, at) for row, at in points if at[1] is not None]
    with rc_context({'svg.fonttype': 'none', 'font.size': 11, 'font.family': 'sans-serif'}):
        figure = Figure(figsize=(6.6, 4.6), layout='constrained')
        axes = figure.subplots()
        axes.set_title(headline(rows, name), loc='left', weight='bold')
        axes.set(xscale='log', xlabel='← faster        time / time of stock', axisbelow=True)
        axes.set_ylabel(name if is_tested else 'MB')
        subs = (1, 2, 5) if max(row.speedup for row in rows) > 7 else (1, 1.5, 2, 3, 4, 5, 7)
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=subs))
        axes.xaxis.set(major_formatter='{x:g}', minor_locator=ticker.NullLocator())
        axes.grid(color='#e4e4e4')
        axes.margins(0.15, 0.15)
        for kind in FORMATS:
            found = [at for row, at in points[1:] if row.format == kind]
            if found:
                axes.plot(*zip(*found), 'o', label=kind, markersize=5)
        for marker, (tool, found) in zip('x+*d', (others or {}).items()):
            axes.plot(*zip(*found), marker, color='#777', label=tool)
        # The original and the chosen model stand out.
        shown = [point for i, point in enumerate(points) if point[0].chosen or not i]
        _mark(axes, *shown)
        if is_tested:  # an axis that is narrower would show noise
            wide = max(row.interval[1] - row.interval[0] for row, _ in points)
            middle, half = points[0][1][1], max(NOISE, wide / 2)
            axes.dataLim.update_from_data_y([middle - half, middle + half], ignore=False)
            axes.autoscale_view()
        figure.legend(loc='outside lower center', ncols=3, frameon=False)
        figure.draw_without_rendering()
        figure.set_layout_engine('none')  # labels move nothing
        _label(axes, points, shown)
        text = io.StringIO()
        figure.savefig(text, format='svg', metadata={'Date': None})
    return text.getvalue()[text.getvalue().index('<svg') :]


def _mark(axes: Axes, stock: tuple, *chosen: tuple) -> None:
    """Mark the points of the original and of the chosen model, with the interval of the latter."""
    axes.plot(*stock[1], 's', color='#222', markersize=9)
    for row, at in chosen:
        axes.plot(*at, 'o', color='#222', fillstyle='none', markersize=13)
        axes.annotate('', at, stock[1], arrowprops=dict(arrowstyle='->', color='#999', shrinkB=9))
        if row.interval:
            bounds = [stock[1][1] + bound for bound in row.interval]
            axes.plot([at[0]] * 2, bounds, '_-', color='#222', linewidth=1, zorder=1)


def _label(axes: Axes, points: Sequence[tuple], shown: Sequence[tuple]) -> None:
    """Name what stands out, and each other candidate where it is fastest, where there is room."""
    named = {row.candidate: (row, at) for row, at in sorted(points, key=lambda p: p[0].speedup)}
    others = [one for name, one in named.items() if all(name != r.candidate for r, _ in shown)]
    to_pixels, scale = axes.transData.transform, 72 / axes.figure.dpi
    drawn = [at for line in axes.lines for at in to_pixels(line.get_xydata())]
    lines = [line.get_xydata() for line in axes.lines if line.get_linestyle() == '-']
    lines += [[at for _, at in shown]] * (len(shown) > 1)  # the arrow
    drawn += [at for ends in lines for at in np.linspace(*to_pixels(ends), 30)]
    taken = [Bbox.from_extents(x - 6, y - 6, x + 6, y + 6) for x, y in drawn]
    for row, at in [*shown, *others]:
        stands_out = any(at is own for _, own in shown)
        words = ['chosen'] * row.chosen + [row.candidate] + [f'{row.speedup:.2f} ×'] * stands_out
        style = dict(weight='bold') if stands_out else dict(fontsize=9)
        beside = dict(textcoords='offset points', ha='center', va='center')
        text = axes.annotate('\n'.join(words), at, (0, 0), **beside, **style)
        size = text.get_window_extent()
        for far, angle in itertools.product((9, 18, 30, 45), range(0, 360, 45)):
            x, y = -math.sin(math.radians(angle)), -math.cos(math.radians(angle))
            place = x * (size.width * scale / 2 + far), y * (size.height * scale / 2 + far)
            text.set_position(place)
            box = text.get_window_extent()
            inside = all(axes.bbox.contains(*corner) for corner in (box.min, box.max))
            if inside and not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)
        if not stands_out:
            line = dict(arrowstyle='-', color='#bbb', linewidth=0.6, shrinkA=0, shrinkB=3)
            axes.annotate('', at, place, textcoords='offset points', arrowprops=line, zorder=1)


def _pictures(cfg: Config, models: list[nn.Module], judge: Judge) -> list[str]:
    """Draw what models find in images, with the config's visualizer, if any, as data URIs."""
    if not cfg.get('visualizer'):
        return []
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
    stem: str, cfg: Config, results: dict, rows: Sequence[Row], shown: Row,
    models: list[nn.Module], judge: Judge,
) -> None:  # fmt: skip
    """Write the report as '….html', which needs no other file, '….md', and its picture '….svg'.

    ``cfg`` is that of the original, ``results`` the content of ``results.json``. What ``models``
    find is drawn: the original, and the model of the row ``shown``.
    """
    metric, picture = results['metric'], scatter(rows, results['metric'])
    head, lines = table(rows, metric)
    heading = f'{osp.basename(results["config"])}: how much faster, at what cost'
    texts = [f'Chosen: {gain(shown, metric)}, which {results["target"]}.'] * shown.chosen
    texts += [f'{title(results)}.', *notes(results, rows)]
    texts.append(', '.join(f'{name} {x}' for name, x in results['environment'].items()))
    write_text(f'{stem}.svg', picture)
    write_text(f'{stem}.md', '\n\n'.join([f'# {heading}', formatted(head, lines), *texts, '']))
    cells = [
        ''.join(f'<{tag}>{html.escape(x)}</{tag}>' for x in line)
        for tag, line in (('th', head), *(('td', line) for line in lines))
    ]
    page = [
        f'<h1>{html.escape(heading)}</h1>', picture, *(f'<p>{html.escape(x)}' for x in texts),
        f'<div><table><tr>{"<tr>".join(cells)}</table></div>',
        f'<h2>What stock (left) and {html.escape(shown.name)} (right) find</h2>',
        *(f'<img src="{uri}" alt="">' for uri in _pictures(cfg, models, judge)),
    ]  # fmt: skip
    write_text(f'{stem}.html', PAGE + '\n'.join(page))
