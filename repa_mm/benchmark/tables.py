"""Results as text."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from repa_mm.benchmark.machine import machine
from repa_mm.benchmark.variants import FAIR

# By its title, what makes the cell of a form.
Columns = dict[str, Callable[[dict], str]]


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells, the first one the header, as the lines of a Markdown table."""
    table = Table(box=box.MARKDOWN)
    for i, title in enumerate(rows[0]):
        table.add_column(title, justify='right' if i else 'left', no_wrap=True)
    for row in rows[1:]:
        table.add_row(*row)
    # No terminal is as wide as some tables; brackets are brackets, not rich's markup.
    console = Console(width=10_000, color_system=None, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().strip().splitlines()]


def forms_table(title: str, forms: dict[str, dict], columns: Columns) -> list[str]:
    """A Markdown table with a line for each form, and functions that make the cells of a form."""
    rows = [[name, *(cell(form) for cell in columns.values())] for name, form in forms.items()]
    return markdown([[title, *columns], *rows])


def means_table(parts: dict[str, dict[str, dict]], digits: int) -> list[list[str]]:
    """Rows with the mean of each part and their sum, from the statistics of models' parts."""
    names = list(dict.fromkeys(part for model in parts.values() for part in model))
    rows = [['mean (ms) of', *names, 'sum']]
    for model, statistics in parts.items():
        means = [statistics.get(name, {}).get('mean', 0.0) for name in names]
        rows.append([model, *(f'{mean:.{digits}f}' for mean in (*means, sum(means)))])
    return rows


def interval(ratio: dict[str, Any]) -> str:
    """A ratio of :func:`~repa_mm.benchmark.timing.compare`, with its interval if it has one."""
    value, low, high = ratio['ratio'], ratio['low'], ratio['high']
    if low == high == 1:  # of the reference
        return '1'
    return f'{value:.3f}' if low is None else f'{value:.3f} [{low:.3f}, {high:.3f}]'


def notes_text(result: dict[str, Any]) -> list[str]:
    """Lines on a result's notes, and on its interruption."""
    lines = [f'Note: {note}.' for note in result.get('notes', ())]
    if result['interrupted']:
        lines.append('Interrupted: this is what was measured until then.')
    return lines


def benchmark_text(result: dict[str, Any]) -> str:
    """The tables of :func:`~repa_mm.benchmark.latency.benchmark`'s result."""
    lines = []
    for point in result['points']:
        lines += ['', _headline(result, point), '', *_latency_table(point)]
        parts = {name: form['parts'] for name, form in point['forms'].items()}
        if any(len(p) > 1 for p in parts.values()):
            lines += ['', *markdown(means_table(parts, 1))]
        if 'peak_tflops' in point:
            lines += ['', *_flops_table(point)]
        if point['loading']:
            lines.append(
                'Loading a batch and its test pipeline, the same for every form and not counted '
                f'above: {np.mean(point["loading"]):.1f} ms (mean).'
            )
    return '\n'.join([*lines, '', *notes_text(result)])


def _headline(result: dict[str, Any], point: dict[str, Any]) -> str:
    options = result['options']
    where = ''.join(f'{k} {v}: ' for k, v in point['point'].items())
    how = [f'{options["amp"]} autocast' if options['amp'] else 'float32']
    if options['compile']:
        how.append(f'torch.compile ({options["compile"]})')
    how += [
        name.replace('_', '-') for name in ('channels_last', 'cuda_graphs', 'tf32') if options[name]
    ]
    what = dict(model='', predict='predict call of ', backbone='backbone of ')[options['part']]
    return (
        f'{where}{what}{result["config"]}; {point["inputs"]}; {", ".join(how)}; '
        f'{machine(result["environment"])}'
    )


def _latency_table(point: dict[str, Any]) -> list[str]:
    num_runs = len(set(point['runs']))

    def milliseconds(key: str, form: dict) -> str:
        time = form['latency'][key]
        return f'{time:.4g}' if time < 1000 else f'{time:.0f}'

    columns: Columns = {key: partial(milliseconds, key) for key in ('median', 'p90', 'p99')}
    columns |= {
        'images/s': lambda form: f'{form["images_per_second"]:.4g}',
        f'ratio to {point["reference"]} [95 %]': lambda form: interval(form['ratio']),
        'change': lambda form: f'{100 * (form["ratio"]["ratio"] - 1):+.1f} %',
    }
    if num_runs > 1:
        columns[f'ratios of {num_runs} runs'] = lambda form: ' to '.join(
            f'{end(form["ratio"]["runs"]):.3f}' for end in (min, max)
        )
    if FAIR in point['forms']:
        columns[f'ratio to {FAIR}'] = lambda form: interval(form['ratio_fair'])
    columns |= {
        'page faults': lambda form: f'{form["page_faults"]["median"]:.0f}',
        'peak memory': lambda form: f'{form["peak_mib"]:.0f} MiB' if form['peak_mib'] else '-',
        'parameters': lambda form: f'{form["parameters"] / 1e6:.1f} M',
    }
    lines = forms_table(f'latency (ms), {point["count"]} batches', point['forms'], columns)
    if num_runs > 1:
        lines.append(
            f'Each run is a process of its own. The range of {num_runs} runs holds the median of '
            f'all such runs with a probability of {100 * (1 - 2 ** (1 - num_runs)):.0f} %; the '
            'interval in brackets is over batches alone.'
        )
    return lines


def _flops_table(point: dict[str, Any]) -> list[str]:
    peak = point['peak_tflops']
    columns: Columns = {
        'GMACs an image': lambda form: f'{form["macs"] / 1e9:.2f}',
        'TFLOP/s': lambda form: f'{form["tflops"]:.3g}',
        f'of {peak:.3g} TFLOP/s': lambda form: f'{100 * form["tflops"] / peak:.0f} %',
    }
    return [
        *forms_table('arithmetic', point['forms'], columns),
        'Multiply-adds of weights, without the attention products; the peak is that of one large '
        'matrix product, measured here.',
    ]


def training_text(result: dict[str, Any]) -> str:
    """The tables of :func:`~repa_mm.benchmark.training.benchmark_training`'s result."""
    options, forms = result['options'], result['forms']
    columns: Columns = {
        'median': lambda form: f'{form["latency"]["median"]:.4g}',
        'p90': lambda form: f'{form["latency"]["p90"]:.4g}',
        'images/s': lambda form: f'{form["images_per_second"]:.4g}',
        f'ratio to {result["reference"]} [95 %]': lambda form: interval(form['ratio']),
        'without optimizer': lambda form: interval(form['ratio_without_optimizer']),
        'saved activations': lambda form: f'{form["saved_mib"]:.0f} MiB',
        'peak memory': lambda form: f'{form["peak_mib"]:.0f} MiB',
    }
    lines = [
        '',
        f'{"whole model" if options["whole"] else "backbone"} of {result["config"]}; '
        f'{options["batch_size"]}x3x{options["size"]}; '
        f'{options["amp"] + " autocast" if options["amp"] else "float32"}; '
        f'optimizer: {options["optimizer"]}; {machine(result["environment"])}',
        '',
        *forms_table(f'step (ms), {result["count"]} steps', forms, columns),
        '',
        *markdown(means_table({name: form['parts'] for name, form in forms.items()}, 1)),
        '',
        'Saved activations: what autograd keeps from the forward pass for the backward pass, '
        "without weights. Peak memory: weights, their gradients, the optimizer's state and "
        "everything else at the step's most expensive moment.",
    ]
    return '\n'.join(lines + notes_text(result))


def profile_text(result: dict[str, Any]) -> str:
    """The table of :func:`~repa_mm.benchmark.profile.profile`'s result."""
    options, models = result['options'], result['models']
    rows = means_table({name: model['layers'] for name, model in models.items()}, 2)
    rows[0] += ['share of FFN', 'without timers', 'cost of timers']
    for row, model in zip(rows[1:], models.values()):
        total, timed = model['total'], model['with_timers']
        row += [
            f'{100 * model["share"]["FFN"]:.1f} %',
            f'{total["mean"]:.2f}',
            f'{100 * (timed["median"] / total["median"] - 1):+.1f} %',
        ]
    lines = [
        '',
        f'{options["batch_size"]}x3x{options["synthetic"]}, {result["count"]} batches, '
        f'{machine(result["environment"])}',
        '',
        *markdown(rows),
        '',
        'Token mixer and FFN count with the norm before them; the rest is downsampling, shortcuts '
        'and the last norms. Cost of timers: of the medians. Weights are random.',
    ]
    return '\n'.join(lines + notes_text(result))


def complexity_text(result: dict[str, Any]) -> str:
    """A table of :func:`~repa_mm.benchmark.flops.complexity`'s result."""
    forms, whole = result['forms'], result['part'] == 'model'
    rows = [[f'input {"x".join(map(str, result["input"]))}']]
    for name in forms:
        rows[0] += [f'{name}: M parameters', 'GMACs']
    children = [child for child in next(iter(forms.values()))['macs'] if child and whole]
    for child in (*children, ''):  # the whole last
        counts = [(f['parameters'].get(child, 0), f['macs'].get(child, 0)) for f in forms.values()]
        if any(parameters for parameters, _ in counts):
            cells = [f'{p / 1e6:.2f} {m / 1e9:.2f}'.split() for p, m in counts]
            rows.append([child or result['part'], *sum(cells, [])])
    lines = markdown(rows) + [
        'Multiply-adds of linear and convolution layers, as in the paper: without attention '
        'products and norms.'
    ]
    if result['two_stage'] and whole:
        lines.append(
            'Those of the RoI heads depend on the proposals; here they are of random weights.'
        )
    return '\n'.join(lines)
