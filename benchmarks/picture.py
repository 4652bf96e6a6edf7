"""Draw docs/convert.png and docs/smaller.png: what cheaper models keep of a metric.

The first is over the share of multiply-adds of conversions, the second over the time of models of
benchmarks/smaller.py. Models of several seeds are averaged::

    python -m benchmarks.picture
"""

from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt

from benchmarks.tables import ROOT, Row, grouped, read, runs

#: Series of docs/smaller.png: their styles, and which forms belong to them.
SMALLER = {
    'narrower blocks (ours)': (
        'o-', lambda form: form == 'original, 160' or form.startswith('budget') and '160' in form
    ),
    'smaller images': ('.--C3', lambda form: form.startswith('original')),
    'smaller images, trained at several sizes': ('.--C1', lambda form: form.startswith('several')),
    'fewer channels, trained from scratch': (
        '^:C2', lambda form: form == 'original, 160' or form.startswith('width')
    ),
}  # fmt: skip


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
    """Draw a panel for each model and metric: the metric over the time in OpenVINO."""
    rows = [row for row in read() if row['what'].startswith('smaller: ')]
    timed = [row for row in rows if row['of'] == 'time, OpenVINO f32']
    times = {
        key: fmean(runs(found).values()) for key, found in grouped(timed, 'model', 'form').items()
    }
    metrics = [row for row in rows if row['of'] in ('box AP', 'mIoU')]
    panels = grouped(metrics, 'model', 'of')
    options = dict(figsize=(4.6 * len(panels), 4.6), squeeze=False, layout='constrained')
    figure, axes = plt.subplots(1, len(panels), **options)
    for axis, ((model, metric), found) in zip(axes.flat, panels.items()):
        original, by_form = runs(found, 'original, 160'), grouped(found, 'form')
        for label, (style, is_of) in SMALLER.items():
            points = []
            for (form,), each in by_form.items():
                time = times.get((model, form.replace('several sizes', 'original')))
                if time and is_of(form):
                    lost = [value - original[run] for run, value in runs(each).items()]
                    points.append((time / times[model, 'original, 160'], fmean(lost)))
            if points:
                axis.plot(*zip(*sorted(points)), style, label=label)
        axis.axhline(0, color='grey', linewidth=0.8)
        axis.set(title=model, xlabel='time of the whole model', ylabel=f'change of {metric}')
        axis.set_ylim(-12, 2)
    lines = axes[0][0].get_legend_handles_labels()
    figure.legend(*lines, loc='outside lower center', ncols=2, frameon=False)
    figure.savefig(path, dpi=80)


if __name__ == '__main__':
    draw(ROOT / 'docs' / 'convert.png')
    draw_smaller(ROOT / 'docs' / 'smaller.png')
