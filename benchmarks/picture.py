"""Draw docs/convert.png and docs/smaller.png: what cheaper models keep of a metric.

The first is over the multiply-adds of the FFNs, of conversions; the second over those of the whole
model, of conversions and of what everyone tries first. Models of several seeds are averaged::

    python -m benchmarks.picture
"""

import re
from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt

from benchmarks.tables import ROOT, Row, grouped, read, runs, smaller_rows

#: Series of docs/smaller.png: style, how the model is trained, and which names belong to it.
SMALLER = {
    'narrower blocks (ours)': ('o-C0', '160×160', r'budget [\d.]+'),
    'smaller images': ('s--C3', '160×160', r'original, images of \d+'),
    'fewer channels, from scratch': ('^:C2', '160×160', r'\d+ channels.*'),
    'narrower blocks, trained at several sizes': ('o-C9', 'several sizes', r'budget [\d.]+'),
    'smaller images, trained at several sizes': ('s--C1', 'several sizes', r'original, images.*'),
}


def curve(rows: list[Row], method: str) -> tuple[list[float], list[float]]:
    """Return shares of the multiply-adds, and the metric there, both ascending in the share.

    A point is the mean of the original over all seeds, plus the mean difference to the original of
    the seeds that have the point.
    """
    found = grouped(rows, 'method', 'keep')
    original, points = runs(found.pop(('original', ''))), {}
    for (name, keep), each in found.items():
        if name == method:
            lost = [value - original[run] for run, value in runs(each).items()]
            points[float(keep)] = fmean(original.values()) + fmean(lost)
    shares = sorted(points)
    return shares, [points[share] for share in shares]


def draw(path: Path) -> None:
    """Draw a panel for each model and metric."""
    rows = [row for row in read() if row['what'].startswith('after a conversion: ')]
    rows = [row for row in rows if row['model'] != 'DINO, digits' and 'digits' not in row['of']]
    panels = grouped(rows, 'model', 'of')
    methods = [method for (method,) in grouped(rows, 'method') if method != 'original']
    width = 4
    height = -(-len(panels) // width)
    figure, axes = plt.subplots(height, width, figsize=(4 * width, 3.6 * height), squeeze=False)
    for axis, ((model, metric), found) in zip(axes.flat, panels.items()):
        for number, method in enumerate(methods):
            style = 'o-' if method == 'ours' else '.--'
            axis.plot(*curve(found, method), style, label=method, color=f'C{number}')
        top = fmean(runs(found, 'original').values())
        axis.axhline(top, color='grey', linewidth=0.8)
        axis.set(title=f'{model}\n{metric}', xlabel="share of the FFNs' multiply-adds")
        axis.set_ylim(0.7 * top, 1.02 * top)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def draw_smaller(path: Path) -> None:
    """Draw a panel for each model: the change of the metric over the multiply-adds."""
    rows = smaller_rows(read())
    macs = [row for row in rows if row['of'] == 'multiply-adds']
    macs = {(row['model'], row['name']): float(row['value']) for row in macs}
    panels = grouped(
        [row for row in rows if row['of'] in ('box AP', 'mask AP', 'mIoU')], 'model', 'of'
    )
    figure, axes = plt.subplots(2, (len(panels) + 1) // 2, figsize=(11, 8.4), layout='constrained')
    for axis, ((model, metric), found) in zip(axes.flat, panels.items()):
        by_name = grouped(found, 'trained', 'name')
        for label, (style, trained, names) in SMALLER.items():
            points = [(1.0, 0.0)]
            for (how, name), each in by_name.items():
                if how == trained and re.fullmatch(names, name):
                    original = runs(by_name[trained, 'original'])
                    lost = fmean(value - original[run] for run, value in runs(each).items())
                    points.append((macs[model, name] / macs[model, 'original'], lost))
            if len(points) > 1:
                axis.plot(*zip(*sorted(points)), style, label=label)
        axis.set(title=model, xlabel='multiply-adds of the model', ylabel=f'change of {metric}')
        axis.set_ylim(-12, 4)
        axis.grid(color='#e4e4e4')
    lines = axes[0][0].get_legend_handles_labels()
    figure.legend(*lines, loc='outside lower center', ncols=2, frameon=False)
    figure.savefig(path, dpi=80)


if __name__ == '__main__':
    draw(ROOT / 'docs' / 'convert.png')
    draw_smaller(ROOT / 'docs' / 'smaller.png')
