"""The table and the picture of what was measured."""

import base64
import copy
import html
import io
import os.path as osp
import platform
from typing import Any

import cv2
import mmcv
import numpy as np
import torch
import torch.nn as nn
from matplotlib import rc_context, ticker
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from mmengine.config import Config
from mmengine.registry import VISUALIZERS
from mmengine.structures import PixelData

from repa_mm.benchmark.timing import show
from repa_mm.files import write_text
from repa_mm.search.formats import BF16, EAGER, F32, FORMATS, INT8, ORT

COLUMNS = (
    'candidate', 'format', 'ms [quartiles]', '× stock [95 %]', '{}', 'difference [95 %]', 'MB', ''
)  # fmt: skip
COLORS = {
    EAGER: '#b8500f', ORT: '#5b53b0', F32: '#1268a8', BF16: '#0f7d6c', INT8: '#b02a6b',
}  # fmt: skip
NUM_PICTURES = 4
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: auto;
  padding: 0 1rem 3rem; }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
.wide { overflow-x: auto } svg { width: 100%; max-width: 44rem; height: auto; display: block }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .875rem }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right;
  white-space: nowrap }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left }
tr.chosen { background: #fdf3d0; font-weight: 600 }
pre { background: #f4f4f4; padding: .75rem; overflow-x: auto }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: .5rem;
  margin-bottom: 1rem }
figure { margin: 0 } img { width: 100% } figcaption { font-size: .875rem }
"""


def cells(rows: list[dict]) -> list[list[str]]:
    """Format the rows of the table. '≈' precedes a test of another format of float32."""
    lines = []
    for row in rows:
        (low, high), (least, most) = row['ms_interval'], row['speedup_interval']
        line = [row['candidate'], row['format'], f'{row["ms"]:.1f} [{low:.1f}, {high:.1f}]']
        line.append(f'{row["speedup"]:.2f} [{least:.2f}, {most:.2f}]')
        if row['metric'] is None:
            line += ['', '']
        else:
            about = '' if row['tested_in'] == row['format'] else '≈ '
            bounds = ', '.join(f'{x:+.2f}' for x in row['interval'])
            line += [f'{about}{row["metric"]:.2f}', f'{about}{row["difference"]:+.2f} [{bounds}]']
        lines.append([*line, f'{row["mb"]:.1f}', 'chosen' if row['chosen'] else ''])
    return lines


def print_table(rows: list[dict], results: dict) -> None:
    """Print the table.

    Args:
        rows (list[dict]): From :func:`repa_mm.speed_up`.
        results (dict): The content of ``results.json``.
    """
    name = results['metric'] or 'metric'
    title = f'{results["config"]}, {results["timed"]} in turn, {results["images"]}'
    show(title, [column.format(name) for column in COLUMNS], cells(rows))
    if results.get('how'):
        print(f'Differences: {results["how"]}. ≈: tested in another format of float32.')


def scatter(rows: list[dict], name: str, timed: str = 'one image') -> str:
    """Draw latency against the metric as SVG. Without tests, the metric's axis is the size."""
    key = 'metric' if any(row['metric'] is not None for row in rows) else 'mb'
    rows = [row for row in rows if row[key] is not None]
    with rc_context({'svg.fonttype': 'none', 'font.size': 11, 'font.family': 'sans-serif'}):
        figure = Figure(figsize=(6.6, 4.6), layout='constrained')
        axes = figure.subplots()
        ylabel = name if key == 'metric' else 'MB'
        axes.set(xscale='log', xlabel=f'ms for {timed}', ylabel=ylabel)
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.xaxis.set(major_formatter='{x:g}', minor_locator=ticker.NullLocator())
        axes.grid(color='#e4e4e4')
        axes.set_axisbelow(True)
        axes.spines[['top', 'right']].set_visible(False)
        axes.margins(0.1)
        axes.plot(rows[0]['ms'], rows[0][key], 's', color='#222', markersize=8, label='stock')
        for kind in FORMATS:
            found = [(row['ms'], row[key]) for row in rows[1:] if row['format'] == kind]
            if found:
                axes.plot(*zip(*found), 'o', color=COLORS.get(kind), markersize=6, label=kind)
        for row in rows:
            if row['chosen']:
                ring = dict(fillstyle='none', color='#222', markersize=13)
                axes.plot(row['ms'], row[key], 'o', label='chosen', **ring)
        figure.legend(loc='outside upper left', ncols=3, frameon=False)
        # One label for each candidate, at its fastest format of float32, where none is yet.
        figure.draw_without_rendering()
        placed: list[Bbox] = []
        for row in sorted(rows[1:], key=lambda row: (not FORMATS[row['format']].exact, row['ms'])):
            text = row['candidate']
            if text in [other.get_text() for other in axes.texts]:
                continue
            for down in 9, -17, 22, -30:
                label = axes.annotate(
                    text, (row['ms'], row[key]), (0, down), textcoords='offset points', ha='center'
                )
                box = label.get_window_extent()
                if box.count_overlaps(placed) == 0:
                    placed.append(box)
                    break
                label.remove()
        text = io.StringIO()
        figure.savefig(text, format='svg', metadata={'Date': None})
    return text.getvalue()[text.getvalue().index('<svg') :]


def _pictures(cfg: Config, models: list[nn.Module], judge: Any) -> list[list[str]]:
    """Draw what models find in images, with the codebase's visualizer, as data URIs."""
    meta = getattr(judge.dataset, 'metainfo', None) or models[0].dataset_meta
    visualizer = dict(cfg.visualizer, vis_backends=None, name=f'speed_up_{id(models)}')
    drawing = VISUALIZERS.build(visualizer)
    drawing.dataset_meta = meta
    found = []
    for data in judge.images(NUM_PICTURES):
        uris = []
        for model in models:
            with torch.no_grad():
                (sample,) = model.test_step(copy.deepcopy(data))
            image = mmcv.imread(sample.img_path, channel_order='rgb')
            image, sample = enlarged(image, sample.cpu())
            if hasattr(drawing, 'visualize_cls'):
                drawing.visualize_cls(image, sample, meta.get('classes'), draw_gt=False)
            else:
                drawing.add_datasample('image', image, sample, draw_gt=False)
            picture = mmcv.imrescale(drawing.get_image()[..., ::-1], min(1, 960 / image.shape[1]))
            _, jpeg = cv2.imencode('.jpg', picture, [cv2.IMWRITE_JPEG_QUALITY, 88])
            uris.append(f'data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}')
        found.append(uris)
    return found


def enlarged(image: np.ndarray, sample: Any) -> tuple[np.ndarray, Any]:
    """Enlarge a small image, and what a model finds in it: labels are drawn in fixed sizes."""
    factor = -(-480 // image.shape[1])
    if factor < 2:
        return image, sample

    def larger(maps: torch.Tensor) -> torch.Tensor:
        return maps.repeat_interleave(factor, -2).repeat_interleave(factor, -1)

    for name in ('pred_sem_seg', 'pred_panoptic_seg'):
        if name in sample:
            maps = {key: larger(value) for key, value in sample.get(name).items()}
            setattr(sample, name, PixelData(**maps))
    if 'pred_instances' in sample:
        found = sample.pred_instances
        found.bboxes = found.bboxes * factor
        if 'masks' in found:
            found.masks = larger(found.masks)
    return mmcv.imrescale(image, factor), sample


def commands(chosen: dict, judge: Any, out_dir: str) -> str:
    """Return the commands that use the chosen model."""
    model, config = osp.join(out_dir, 'model'), osp.join(out_dir, 'tested.py')
    lines, size = [f'python tools/test.py {config} {model}.pth'], '--dataset'
    if not judge.config:
        height, width = judge.images(1)[0]['inputs'][0].shape[-2:]
        lines, config, size = [], f'{model}.py', f'--input-shape {height} {width}'
    if chosen['file']:
        file = model + osp.splitext(chosen['file'])[1]
        kind = FORMATS[chosen['format']].runtime
        precision, suffix = (f' --precision {kind}', f':{kind}') if kind else ('', '')
        if lines:
            lines.append(f'python tools/test_exported.py {config} {file}{precision}')
        time = f'python tools/benchmark.py {config} {model}.pth {size}'
        lines.append(f'{time} --exported {file}{suffix}')
    return '\n'.join(lines)


def _table(header: list[str], rows: list[list[str]], chosen: list[bool]) -> str:
    def line(tag: str, values: list[str]) -> str:
        return ''.join(f'<{tag}>{html.escape(str(value))}</{tag}>' for value in values)

    body = ''.join(
        f'<tr{" class=chosen" if mark else ""}>{line("td", row)}</tr>'
        for row, mark in zip(rows, chosen)
    )
    return f'<div class="wide"><table><tr>{line("th", header)}</tr>{body}</table></div>'


def write_report(
    path: str,
    cfg: Config,
    results: dict,
    notes: list[str],
    shown: dict,
    models: list[nn.Module],
    judge: Any,
) -> None:
    """Write everything into one HTML file that needs no other, and its picture beside it.

    Args:
        path (str): The file, '….html'. The picture is '….svg'.
        cfg (Config): Config of the original model.
        results (dict): The content of ``results.json``.
        notes (list[str]): What was left out, and why.
        shown (dict): The row whose predictions are drawn: the chosen one, or else the fastest.
        models (list[nn.Module]): Stock, and the model of this row.
        judge: What the models were tested with.
    """
    rows = results['rows']
    chosen = next((row for row in rows if row['chosen']), None)
    name = f'{shown["candidate"]}, {shown["format"]}'
    summary = 'No target was given: nothing is chosen.'
    if chosen:
        summary = f'Chosen: {name}, which {results["target"]}. It runs in {chosen["ms"]:.1f} ms, '
        summary += f'{chosen["speedup"]:.2f} times as fast as stock'
        if chosen['metric'] is not None:
            low, high = chosen['interval']
            summary += (
                f', with {results["metric"]} {chosen["metric"]:.2f}: {chosen["difference"]:+.2f} '
            )
            summary += f'points [{low:+.2f}, {high:+.2f}]'
        summary += '.'
    elif results['target']:
        summary = f'Nothing {results["target"]}: nothing is chosen.'
    tested = f'Tested on {results["images"]}; intervals: {results.get("how", "none")}.'
    if rows[0]['metric'] is None:
        tested = 'Nothing was tested.'
    elif judge.name == 'agreement':
        tested += ' There are no annotations: agreement compares with what the original finds.'
    candidates = results['candidates'].values()
    header = [column.format(results['metric'] or 'metric') for column in COLUMNS]
    marks = [row['chosen'] for row in rows]
    picture = scatter(rows, results['metric'], results['timed'])
    sections = [
        f'<h1>{html.escape(osp.basename(results["config"]))}: how much faster, at what cost</h1>',
        f'<p>{html.escape(summary)}</p>', picture, '<h2>Table</h2>',
        _table(header, cells(rows), marks),
        f'<p>{html.escape(results["timed"].capitalize())} in turn, on '
        f'{html.escape(processor(results["device"]))}. ≈: tested in another format of float32. '
        f'{html.escape(tested)}</p>', *(f'<p>{html.escape(note)}</p>' for note in notes),
    ]  # fmt: skip
    if candidates:
        sizes: dict[str, dict[str, str]] = {}
        for found in candidates:
            for block in found['blocks']:
                row = sizes.setdefault(block['name'], {'before': _size(block['before'])})
                row[found['name']] = _size(block['after'])
        columns = ['before', *(found['name'] for found in candidates)]
        lines = [[part, *(row.get(c, '') for c in columns)] for part, row in sizes.items()]
        sections.append('<h2>Widths</h2><p>Hidden channels of FFNs; dimensions of queries and '
                        'keys + values in a head.</p>')  # fmt: skip
        sections.append(_table(['part', *columns], lines, [False] * len(lines)))
    sections.append(f'<h2>What stock (left) and {html.escape(name)} (right) find</h2>')
    for first, second in _pictures(cfg, models, judge):
        sections.append('<div class="pair">')
        for uri, caption in ((first, 'stock'), (second, name)):
            sections.append(
                f'<figure><img src="{uri}" alt="{html.escape(caption)}"><figcaption>'
                f'{html.escape(caption)}</figcaption></figure>'
            )
        sections.append('</div>')
    if chosen:
        use = html.escape(commands(chosen, judge, osp.dirname(path)))
        sections.append(f'<h2>Commands</h2><pre>{use}</pre>')
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width, initial-scale=1"><title>Speed</title><style>{STYLE}</style>'
        f'{"".join(sections)}</html>'
    )
    write_text(f'{osp.splitext(path)[0]}.svg', picture)
    write_text(path, page)


def _size(values: list[int]) -> str:
    return ' + '.join(map(str, values))


def processor(device: str) -> str:
    """Return the name of a device, with the number of threads of a CPU."""
    if torch.device(device).type == 'cuda':
        return torch.cuda.get_device_name(device)
    try:
        with open('/proc/cpuinfo', encoding='utf-8') as file:
            name = next(line.split(':')[1].strip() for line in file if 'model name' in line)
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f'{name}, {torch.get_num_threads()} threads'
