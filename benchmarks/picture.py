"""Draw docs/convert.png: what conversions keep of a metric, over the multiply-adds of the FFNs.

Models of several seeds are averaged::

    python -m benchmarks.picture
"""

from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt

from benchmarks.tables import ROOT, Row, grouped, read, runs


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


if __name__ == '__main__':
    draw(ROOT / 'docs' / 'convert.png')
