"""Plots of results."""

import os.path as osp
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from repa_mm.benchmark.machine import machine
from repa_mm.files import replacing

# Of one family, and told apart by people who see few colours too.
COLOURS = ('#9ecae1', '#08519c', '#41ab5d', '#fdae6b', '#bdbdbd', '#756bb1')


def plot_profile(result: dict[str, Any], path: str) -> None:
    """Draw the layers' times as bars, one for each model."""
    models, options = result['models'], result['options']
    figure, axes = _figure(1.8 + 0.4 * len(models))
    bars = {
        f'{name}\nFFN {100 * model["share"]["FFN"]:.0f} %': _means(model['layers'])
        for name, model in models.items()
    }
    _bars(axes, bars, f'mean latency (ms), {options["batch_size"]}x3x{options["synthetic"]}')
    _save(figure, path, machine(result['environment']))


def plot_benchmark(result: dict[str, Any], path: str) -> None:
    """Draw latencies as bars, or as lines over the points of a sweep."""
    points = result['points']
    title = f'{osp.splitext(osp.basename(result["config"]))[0]}, {machine(result["environment"])}'
    if len(points) > 1:
        figure, axes = _figure(4.5)
        _lines(axes, points)
    else:
        forms = points[0]['forms']
        figure, axes = _figure(1.8 + 0.5 * len(forms))
        bars = {name: _means(form['parts']) for name, form in forms.items()}
        _bars(axes, bars, f'mean latency of a batch (ms), {points[0]["inputs"]}')
    _save(figure, path, title)


def _means(parts: dict[str, dict]) -> dict[str, float]:
    return {name: statistics['mean'] for name, statistics in parts.items()}


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, height), layout='constrained')
    axes = figure.add_subplot()
    axes.spines[['top', 'right']].set_visible(False)
    return figure, axes


def _save(figure: Figure, path: str, title: str) -> None:
    figure.suptitle(title, fontsize='medium')
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)


def _bars(axes: Axes, bars: dict[str, dict[str, float]], unit: str) -> None:
    """Horizontal bars of parts, each with its total."""
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    left = [0.0] * len(bars)
    for part, colour in zip(parts, COLOURS):
        widths = [bar.get(part, 0.0) for bar in bars.values()]
        axes.barh(list(bars), widths, left=left, color=colour, label=part)
        left = [a + b for a, b in zip(left, widths)]
    axes.bar_label(axes.containers[-1], [f'{total:.4g}' for total in left], padding=4)
    axes.set_xlim(0, 1.12 * max(left))
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    if len(parts) > 1:
        place = dict(loc='lower center', bbox_to_anchor=(0.5, 1))
        axes.legend(frameon=False, ncols=len(parts), fontsize='small', **place)


def _lines(axes: Axes, points: list[dict[str, Any]]) -> None:
    """Latency over what a sweep changes."""
    key = next(iter(points[0]['point']))
    labels = [point['point'][key] for point in points]
    if key == 'size':
        places = [point['shapes'][0][-1] * point['shapes'][0][-2] / 1e6 for point in points]
        axes.set_xlabel('image size (megapixels)')
    else:
        places = list(map(float, labels))
        axes.set_xlabel(key.replace('-', ' '))
    order = sorted(range(len(points)), key=places.__getitem__)
    x = [places[i] for i in order]
    for name, colour in zip(points[0]['forms'], COLOURS[1:]):
        latency = [points[i]['forms'][name]['latency'] for i in order]
        low, middle, high = ([v[k] for v in latency] for k in ('min', 'median', 'p90'))
        axes.plot(x, middle, 'o-', color=colour, label=name)
        axes.fill_between(x, low, high, color=colour, alpha=0.2)
    style = dict(ha='center', textcoords='offset points', fontsize='x-small')
    for place, label in zip(places, labels):
        axes.annotate(label, (place, 0), (0, 2), **style)
    axes.set_ylim(bottom=0)
    axes.set_ylabel('latency of a batch (ms): median, min to p90')
    axes.legend(frameon=False)


def plot_sweep(result: dict[str, Any], path: str) -> None:
    """Draw quality against latency for conversions with several idle ratios.

    Args:
        result (dict): As :func:`repa_mm.benchmark.sweep.sweep_conversions` returns it. Quality is
            the first metric, or the difference of the features where nothing was tested.
        path (str): The picture.

    Raises:
        OSError: If the file cannot be written.
    """
    figure, axes = _figure(4.5)
    rows = result['rows']
    metric = next(iter(rows[0]['metrics']), None)

    def quality(row: dict) -> float | None:
        return row['metrics'].get(metric) if metric else row['difference']

    rows = [row for row in rows if quality(row) is not None]
    for row in rows[:1]:
        axes.plot(row['latency_ms'], quality(row), 's', color='black', label='original')
    for distilled, label, colour in (
        (False, 'converted', COLOURS[1]),
        (True, 'distilled', COLOURS[3]),
    ):
        chosen = [row for row in rows[1:] if row['distilled'] == distilled]
        if not chosen:
            continue
        points = [(row['latency_ms'], quality(row)) for row in chosen]
        axes.plot(*zip(*points), 'o-', color=colour, label=label)
        for row, point in zip(chosen, points):
            style = dict(textcoords='offset points', fontsize='x-small')
            axes.annotate(f'{row["idle_ratio"]:g}', point, (4, 4), **style)
    axes.set_xlabel('latency of the backbone (ms), with the idle ratio at each point')
    axes.set_ylabel(metric or 'difference of features (share of their variance)')
    axes.legend(frameon=False)
    name = osp.splitext(osp.basename(result['config']))[0]
    _save(figure, path, f'{name}, {result["machine"]}')
