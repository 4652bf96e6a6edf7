"""What measurements look like: tables, JSON and plots."""

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from repa_mm.benchmark.forms import FAIR
from repa_mm.files import check_output, replacing
from repa_mm.runtime.cli import align
from repa_mm.version import __version__

# Of one family, and told apart by people who see few colours too.
COLOURS = ('#9ecae1', '#08519c', '#41ab5d', '#fdae6b', '#bdbdbd', '#756bb1')
PACKAGES = ('torchvision', 'mmengine', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain', 'numpy')


def environment(device: str = 'cpu') -> dict[str, Any]:
    """The machine and the versions that a measurement was taken with."""
    device = torch.device(device)
    versions = dict(repa_mm=__version__, python=platform.python_version(), torch=torch.__version__)
    for name in PACKAGES:
        try:
            versions[name] = import_module(name).__version__
        except ImportError:
            versions[name] = None
    result = dict(
        time=time.strftime('%Y-%m-%d %H:%M:%S %z'),
        command=['python', *sys.argv],
        platform=platform.platform(),
        cpu=_cpu_name(),
        cpu_count=os.cpu_count(),
        threads=torch.get_num_threads(),
        device=str(device),
        tf32=torch.backends.cuda.matmul.allow_tf32,
        versions=versions,
    )
    if device.type == 'cuda':
        properties = torch.cuda.get_device_properties(device)
        result.update(
            gpu=properties.name,
            gpu_memory_gib=properties.total_memory / 2**30,
            cuda=torch.version.cuda,
            cudnn=torch.backends.cudnn.version(),
        )
    return result


def _cpu_name() -> str:
    try:
        with open('/proc/cpuinfo', encoding='utf-8') as file:
            for line in file:
                if line.startswith('model name'):
                    return line.partition(':')[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine(environment: dict[str, Any]) -> str:
    """The machine in a line."""
    threads = environment['threads']
    name = environment.get('gpu') or (
        f'{environment["cpu"]}, {threads} thread{"s" * (threads > 1)}'
    )
    return f'{name}, PyTorch {environment["versions"]["torch"]}'


def write_json(result: dict[str, Any], path: str) -> None:
    """Write a result, all of it or nothing.

    Raises:
        OSError: If it cannot be written.
    """
    with replacing(path) as temporary, open(temporary, 'w', encoding='utf-8') as file:
        json.dump(result, file, indent=1, default=str, allow_nan=False)


def check_outputs(
    out: str | None = None, plot: str | None = None, inputs: Sequence[str | None] = ()
) -> None:
    """Check, before hours of measuring, that the files can be written.

    Args:
        out (str, optional): Path of a JSON file.
        plot (str, optional): Path of a plot.
        inputs (Sequence[str]): Files that must not be replaced.

    Raises:
        OSError: If one cannot be written.
        ValueError: If it is an input, both are the same or matplotlib does
            not know the plot's format.
    """
    check_output(out, *inputs)
    check_output(plot, out, *inputs)
    if plot:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        known = FigureCanvasAgg.get_supported_filetypes()
        if os.path.splitext(plot)[1][1:].lower() not in known:
            raise ValueError(
                f'--plot {plot!r}: name a file that ends in one of .{", .".join(sorted(known))}'
            )


def interval(ratio: dict[str, Any]) -> str:
    """A ratio, with its interval if it has one."""
    text = f'{ratio["ratio"]:.3f}'
    if ratio['low'] is not None:
        text += f' [{ratio["low"]:.3f}, {ratio["high"]:.3f}]'
    return text


def benchmark_text(result: dict[str, Any]) -> str:
    """The tables of :func:`~repa_mm.benchmark.latency.benchmark`'s result."""
    lines = []
    for run in result['runs']:
        lines += ['', _headline(result, run), '', *_latency_table(run)]
        if any(len(form['parts']) > 1 for form in run['forms'].values()):
            lines += ['', *_parts_table(run)]
        if 'peak_tflops' in run:
            lines += ['', *_flops_table(run)]
        if run['data']:
            lines.append(
                'Loading a batch and its test pipeline, the same for every '
                f'form and not counted above: {run["data"]["mean"]:.1f} ms '
                '(mean).'
            )
    lines += ['', *(f'Note: {note}.' for note in result['notes'])]
    if result['interrupted']:
        done = sum(run['count'] for run in result['runs'])
        lines.append(f'Interrupted: this is what was measured until then ({done} batches).')
    return '\n'.join(lines)


def _headline(result: dict[str, Any], run: dict[str, Any]) -> str:
    options = result['options']
    point = ', '.join(f'{k} {v}' for k, v in run['point'].items())
    how = [f'{options["amp"]} autocast' if options['amp'] else 'float32']
    if options['compile']:
        how.append(f'torch.compile ({options["compile"]})')
    how += [
        name.replace('_', '-') for name in ('channels_last', 'cuda_graphs', 'tf32') if options[name]
    ]
    what = 'backbone of ' * (options['part'] == 'backbone')
    return (
        f'{point}{": " * bool(point)}{what}{result["config"]}; '
        f'{run["inputs"]}; {", ".join(how)}; '
        f'{machine(result["environment"])}'
    )


def _latency_table(run: dict[str, Any]) -> list[str]:
    confidence = next(iter(run['forms'].values()))['ratio']['confidence']
    fair = FAIR in run['forms']
    rows = [
        (
            f'latency (ms), {run["count"]} batches',
            'median',
            'p90',
            'p99',
            'images/s',
            f'ratio to {run["reference"]} [{100 * confidence:.0f} %]',
            'change',
            *[f'ratio to {FAIR}'] * fair,
            'peak memory',
            'parameters',
        )
    ]
    for name, form in run['forms'].items():
        latency = form['latency']
        ratio = form['ratio']['ratio']
        other = name != run['reference']
        peak = form['peak_mib']
        rows.append(
            (
                name,
                *(
                    f'{latency[key]:.4g}' if latency[key] < 1000 else f'{latency[key]:.0f}'
                    for key in ('median', 'p90', 'p99')
                ),
                f'{form["images_per_second"]:.4g}',
                interval(form['ratio']) if other else '1',
                f'{100 * (ratio - 1):+.1f} %' if other else '',
                *([interval(form['ratio_fair']) if name != FAIR else '1'] if fair else []),
                f'{peak:.0f} MiB' if peak else '-',
                f'{form["parameters"] / 1e6:.1f} M',
            )
        )
    return align(rows)


def _parts_table(run: dict[str, Any]) -> list[str]:
    parts = []
    for form in run['forms'].values():
        parts += [part for part in form['parts'] if part not in parts]
    rows = [('mean (ms) of', *parts, 'sum')]
    for name, form in run['forms'].items():
        means = [form['parts'].get(part, {}).get('mean', 0.0) for part in parts]
        rows.append((name, *(f'{mean:.1f}' for mean in means), f'{sum(means):.1f}'))
    return align(rows)


def training_text(result: dict[str, Any]) -> str:
    """The tables of ``benchmark_training``'s result."""
    options = result['options']
    how = f'{options["amp"]} autocast' if options['amp'] else 'float32'
    what = 'whole model' if options['whole'] else 'backbone'
    reference = result['reference']
    lines = [
        '',
        f'{what} of {result["config"]}; {options["batch_size"]}x3x'
        f'{options["size"]}; {how}; optimizer: {options["optimizer"]}; '
        f'{machine(result["environment"])}',
        '',
    ]
    rows = [
        (
            f'step (ms), {result["count"]} steps',
            'median',
            'p90',
            'images/s',
            f'ratio to {reference} [95 %]',
            'without optimizer',
            'saved activations',
            'peak memory',
        )
    ]
    for name, form in result['forms'].items():
        step, other = form['step'], name != reference
        rows.append(
            (
                name,
                f'{step["median"]:.4g}',
                f'{step["p90"]:.4g}',
                f'{form["images_per_second"]:.4g}',
                interval(form['ratio']) if other else '1',
                interval(form['ratio_without_optimizer']) if other else '1',
                f'{form["saved_mib"]:.0f} MiB',
                f'{form["peak_mib"]:.0f} MiB',
            )
        )
    lines += align(rows) + ['']
    parts = list(next(iter(result['forms'].values()))['parts'])
    rows = [('mean (ms) of', *parts)]
    for name, form in result['forms'].items():
        rows.append((name, *(f'{form["parts"][part]["mean"]:.1f}' for part in parts)))
    lines += align(rows) + [
        '',
        'Saved activations: what autograd keeps from the forward pass for '
        'the backward pass, without weights. Peak memory: weights, their '
        "gradients, the optimizer's state and everything else at the step's "
        'most expensive moment.',
        *(f'Note: {n}.' for n in result['notes']),
    ]
    if result['interrupted']:
        lines.append('Interrupted: this is what was measured until then.')
    return '\n'.join(lines)


def profile_text(result: dict[str, Any]) -> str:
    """The table of :func:`~repa_mm.benchmark.profile.profile`'s result."""
    options = result['options']
    names = []
    for model in result['models'].values():
        names += [layer for layer in model['layers'] if layer not in names]
    rows = [('mean (ms) of', *names, 'sum', 'share of FFN', 'without timers', 'cost of timers')]
    for name, model in result['models'].items():
        means = [model['layers'].get(layer, {}).get('mean', 0.0) for layer in names]
        total, timed = (model[key]['median'] for key in ('total', 'with_timers'))
        rows.append(
            (
                name,
                *(f'{mean:.2f}' for mean in means),
                f'{sum(means):.2f}',
                f'{100 * model["share"]["FFN"]:.1f} %',
                f'{model["total"]["mean"]:.2f}',
                f'{100 * (timed / total - 1):+.1f} %',
            )
        )
    lines = [
        '',
        f'{options["batch_size"]}x3x{options["size"]}, '
        f'{result["count"]} batches, {machine(result["environment"])}',
        '',
        *align(rows),
        '',
        'Token mixer and FFN count with the norm before them; the rest '
        'is downsampling, shortcuts and the last norms. Cost of timers: '
        'of the medians. Weights are random.',
    ]
    if result['interrupted']:
        lines.append('Interrupted: this is what was measured until then.')
    return '\n'.join(lines)


def plot_profile(result: dict[str, Any], path: str) -> None:
    """Bars of the layers' times, one for each model."""
    models = result['models']
    figure, axes = new_figure(height=1.8 + 0.4 * len(models))
    stacked_bars(
        axes,
        {
            f'{name}\nFFN {100 * model["share"]["FFN"]:.0f} %': {
                layer: v['mean'] for layer, v in model['layers'].items()
            }
            for name, model in models.items()
        },
        f'mean latency (ms), {result["options"]["batch_size"]}x3x{result["options"]["size"]}',
    )
    figure.suptitle(machine(result['environment']), fontsize='medium')
    save_figure(figure, path)


def _flops_table(run: dict[str, Any]) -> list[str]:
    peak = run['peak_tflops']
    rows = [('arithmetic', 'GMACs an image', 'TFLOP/s', f'of {peak:.3g} TFLOP/s')]
    for name, form in run['forms'].items():
        rows.append(
            (
                name,
                f'{form["macs"] / 1e9:.2f}',
                f'{form["tflops"]:.3g}',
                f'{100 * form["tflops"] / peak:.0f} %',
            )
        )
    return align(rows) + [
        'Multiply-adds of weights, without the attention products; the peak '
        'is that of one large matrix product, measured here.'
    ]


def new_figure(width: float = 8, height: float = 4.5):
    """A figure with one pair of axes, which needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout='constrained')
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for side in ('top', 'right'):
        axes.spines[side].set_visible(False)
    return figure, axes


def save_figure(figure, path: str) -> None:
    """Write a figure, all of it or nothing.

    Raises:
        ValueError: If matplotlib does not know the format of that name.
    """
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)


def stacked_bars(axes, bars: dict[str, dict[str, float]], unit: str) -> None:
    """Horizontal bars of parts, each with its total.

    Args:
        axes: Of matplotlib.
        bars (dict): For each bar its parts, by name.
        unit (str): Of the numbers, for the axis.
    """
    parts: list[str] = []
    for bar in bars.values():
        parts += [part for part in bar if part not in parts]
    left = [0.0] * len(bars)
    for part, colour in zip(parts, COLOURS):
        widths = [bar.get(part, 0.0) for bar in bars.values()]
        axes.barh(list(bars), widths, left=left, color=colour, label=part)
        left = [a + b for a, b in zip(left, widths)]
    for i, total in enumerate(left):
        axes.annotate(f'{total:.4g}', (total, i), (4, 0), va='center', textcoords='offset points')
    axes.set_xlim(0, 1.12 * max(left))
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    if len(parts) > 1:
        axes.legend(
            frameon=False,
            ncols=len(parts),
            loc='lower center',
            bbox_to_anchor=(0.5, 1),
            fontsize='small',
        )


def plot_benchmark(result: dict[str, Any], path: str) -> None:
    """Bars of a benchmark's latencies, or lines over the points of a sweep."""
    runs = result['runs']
    title = os.path.splitext(os.path.basename(result['config']))[0]
    caption = f'{title}, {machine(result["environment"])}'
    if len(runs) == 1:
        forms = runs[0]['forms']
        figure, axes = new_figure(height=1.8 + 0.5 * len(forms))
        stacked_bars(
            axes,
            {
                name: {part: v['mean'] for part, v in form['parts'].items()}
                for name, form in forms.items()
            },
            f'mean latency of a batch (ms), {runs[0]["inputs"]}',
        )
        figure.suptitle(caption, fontsize='medium')
        save_figure(figure, path)
        return
    figure, axes = new_figure()
    key = next(iter(runs[0]['point']))
    labels = [run['point'][key] for run in runs]
    if key == 'size':
        positions = [run['shapes'][0][-1] * run['shapes'][0][-2] / 1e6 for run in runs]
        axes.set_xlabel('image size (megapixels)')
    else:
        positions = [float(label) for label in labels]
        axes.set_xlabel(key.replace('-', ' '))
    order = sorted(range(len(runs)), key=positions.__getitem__)
    for name, colour in zip(runs[0]['forms'], COLOURS[1:]):
        latency = [runs[i]['forms'][name]['latency'] for i in order]
        x = [positions[i] for i in order]
        axes.plot(x, [v['median'] for v in latency], 'o-', color=colour, label=name)
        axes.fill_between(
            x, [v['min'] for v in latency], [v['p90'] for v in latency], color=colour, alpha=0.2
        )
    for i in order:
        axes.annotate(
            labels[i],
            (positions[i], 0),
            (0, 2),
            ha='center',
            textcoords='offset points',
            fontsize='x-small',
        )
    axes.set_ylim(bottom=0)
    axes.set_ylabel('latency of a batch (ms): median, min to p90')
    axes.legend(frameon=False)
    figure.suptitle(caption, fontsize='medium')
    save_figure(figure, path)
