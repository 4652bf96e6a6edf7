"""Latency of the variants of a model, in one process or in several."""

import copy
import dataclasses
import multiprocessing
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn as nn
from torch.utils.benchmark import Timer

from repa_mm.benchmark.execution import accelerated, explained
from repa_mm.benchmark.inputs import (
    DatasetInputs,
    NoiseInputs,
    TensorInputs,
    check_memory,
    parse_size,
    shapes_of,
)
from repa_mm.benchmark.machine import AMP_DTYPES, environment, set_machine
from repa_mm.benchmark.memory import peak_bytes, weight_bytes
from repa_mm.benchmark.progress import Progress
from repa_mm.benchmark.timing import Clock, Recorder, Times, compare, measure, statistics
from repa_mm.benchmark.variants import FAIR, build_variants, load_configs
from repa_mm.engine.complexity import count_macs, count_parameters

WHAT = ('model', 'predict', 'backbone')
RATIO = 'model.backbone.idle_ratio'
RANDOM_DETECTOR = (
    'such a detector finds fewer boxes than a trained one, mostly none, so the time of its '
    'post-processing is not representative'
)


@dataclasses.dataclass
class Options:
    """What to measure and how; the fields are the options of tools/benchmark.py."""

    config: str = ''
    checkpoint: str | None = None
    baseline: str | None = None
    baseline_checkpoint: str | None = None
    cfg_options: dict | None = None
    part: str = 'model'
    synthetic: str | None = None
    batch_size: int = 1
    num_images: int = 100
    warmup: int = 10
    runs: int = 1
    device: str = 'cpu'
    threads: int | None = None
    amp: str | None = None
    compile: str | None = None
    cuda_graphs: bool = False
    channels_last: bool = False
    tf32: bool = False
    fair: bool = False
    sweep: str | None = None
    memory: bool = True
    flops: bool = False


def parse_sweep(options: Options) -> list[tuple[dict[str, str], Options]]:
    """Points of a sweep with their options: 'batch=1,2' gives {'batch': '1'} and {'batch': '2'}."""
    if options.sweep is None:
        return [({}, options)]
    key, _, values = options.sweep.partition('=')
    points = []
    try:
        for value in filter(None, map(str.strip, values.split(','))):
            if key == 'size':
                parse_size(value)
                change: dict[str, Any] = dict(synthetic=value)
            elif key == 'batch' and value.isdecimal() and int(value):
                change = dict(batch_size=int(value))
            elif key == 'idle-ratio' and 0 <= float(value) <= 1:
                change = dict(cfg_options={**(options.cfg_options or {}), RATIO: float(value)})
            else:
                raise ValueError
            points.append(({key: value}, dataclasses.replace(options, **change)))
        if not points:
            raise ValueError
    except ValueError:
        raise ValueError(
            f'--sweep {options.sweep!r} is malformed: write size=512x512,800x1344 or batch=1,2,4 '
            'or idle-ratio=0.25,0.5,0.75'
        ) from None
    return points


def check_options(options: Options) -> list[tuple[dict[str, str], Options]]:
    """Check options before models are built, and set the machine; the points of the sweep.

    Raises:
        ValueError: If options do not fit each other or the machine.
    """
    points = parse_sweep(options)
    for name in ('num_images', 'batch_size', 'runs'):
        if getattr(options, name) < 1:
            raise ValueError(f'--{name.replace("_", "-")} must be at least 1')
    if options.warmup < 0:
        raise ValueError('--warmup must not be negative')
    if options.flops and options.part != 'backbone':
        raise ValueError('--flops counts those of a backbone: add --part backbone')
    for point, here in points:
        if here.synthetic:
            check_memory(parse_size(here.synthetic), here.batch_size)
        elif options.part != 'model':
            raise ValueError(f'--part {options.part} takes noise: add --synthetic 224x224')
        if 'idle-ratio' in point and options.checkpoint:
            raise ValueError(
                '--sweep idle-ratio builds models of other shapes: it goes without a checkpoint'
            )
    set_machine(options.device, options.threads, options.tf32, options.amp)
    if options.cuda_graphs and torch.device(options.device).type != 'cuda':
        raise ValueError('--cuda-graphs needs --device cuda')
    return points


def benchmark(options: Options, quiet: bool = False, title: str = '') -> dict[str, Any]:
    """Measure a model's training form, deploy form and vanilla counterpart.

    The variants take turns on every image. Latency is that of ``test_step`` on a loaded batch, as
    MMDetection's and MMSegmentation's own tools have it: from the images in memory to the
    predictions. With ``part='predict'`` it is that of ``model(..., mode='predict')`` on normalized
    noise, timed from outside. Without checkpoints, weights are random. Ctrl-C ends the measurement
    early.

    Args:
        options (Options): What to measure and how.
        quiet (bool): Show no progress. Defaults to False.
        title (str): What the progress shows. Defaults to nothing.

    Returns:
        dict: ``environment``, ``options``, ``notes``, ``interrupted``, the texts of the configs,
        and ``points``: one for each point of the sweep, as :func:`measure_forms` returns it, with
        its ``point``. Of several runs, the samples are put together.

    Raises:
        FileNotFoundError: If a file or the data set is missing.
        ValueError: If options do not fit each other, the model or the machine.
        CheckpointError: If a checkpoint does not fit.
        KeyboardInterrupt: If it ended before anything was measured.
    """
    points = check_options(options)
    if options.runs > 1:
        return _in_processes(options, quiet)
    cfg, baseline = load_configs(options.config, options.baseline, options.cfg_options)
    if 'idle-ratio' in points[0][0] and 'idle_ratio' not in cfg.model.get('backbone', {}):
        raise ValueError('--sweep idle-ratio needs a config whose model.backbone has an idle_ratio')
    notes = []
    if not options.checkpoint:
        notes.append('weights are random, BatchNorm statistics too')
        if cfg.default_scope == 'mmdet' and options.part != 'backbone':
            notes.append(RANDOM_DETECTOR)
    result: dict[str, Any] = dict(
        tool='benchmark',
        config=options.config,
        options=dataclasses.asdict(options),
        environment=environment(options.device),
        config_text=cfg.pretty_text,
        baseline_text=baseline.pretty_text if baseline else None,
        notes=notes,
        interrupted=False,
        points=[],
    )
    forms = None
    try:
        for point, here in points:
            if forms is None or 'idle-ratio' in point:
                cfg, baseline = load_configs(here.config, here.baseline, here.cfg_options)
                weights = here.checkpoint, baseline, here.baseline_checkpoint
                forms = build_variants(cfg, *weights, here.fair, here.device, notes)
            words = ' '.join((title, *(f'{k} {v}' for k, v in point.items()))).strip()
            measured = measure_forms(forms, make_inputs(cfg, here), here, words, quiet)
            notes += [note for note in measured.pop('notes') if note not in notes]
            if measured['count']:
                result['points'].append(dict(point=point, **measured))
            if measured['interrupted']:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        if not result['points']:
            raise
        result['interrupted'] = True
    return result


def _in_processes(options: Options, quiet: bool) -> dict[str, Any]:
    """:func:`benchmark` in fresh processes, one after the other; their results in one."""
    results: list[dict[str, Any]] = []
    try:
        for run in range(options.runs):
            # The peak memory is the same each time.
            here = dataclasses.replace(options, runs=1, memory=options.memory and not run)
            with multiprocessing.get_context('spawn').Pool(1) as pool:
                title = f'run {run + 1} of {options.runs}'
                results.append(pool.apply(benchmark, (here, quiet, title)))
            if results[-1]['interrupted']:
                break
    except KeyboardInterrupt:
        if not results:
            raise
    return dict(
        results[0],
        options=dataclasses.asdict(options),
        notes=list(dict.fromkeys(note for result in results for note in result['notes'])),
        interrupted=len(results) < options.runs or results[-1]['interrupted'],
        points=[
            _together([r['points'][i] for r in results if i < len(r['points'])])
            for i in range(len(results[0]['points']))
        ],
    )


def _together(points: list[dict[str, Any]]) -> dict[str, Any]:
    """The same point of several runs: all of its samples, and their statistics."""
    result = copy.deepcopy(points[0])
    for run, point in enumerate(points[1:], 1):
        result['runs'] += [run] * point['count']
        for key in ('shapes', 'loading'):
            result[key] += point[key]
        for name, form in result['forms'].items():
            for key, samples in form['raw'].items():
                samples += point['forms'][name]['raw'][key]
    result['count'] = len(result['runs'])
    _add_statistics(result)
    return result


def make_inputs(cfg, options: Options) -> Callable:
    """The batches that the options ask for."""
    if not options.synthetic:
        return DatasetInputs(cfg, options.batch_size)
    size = parse_size(options.synthetic)
    if options.part == 'backbone':
        return TensorInputs(size, options.batch_size, options.device, options.channels_last)
    return NoiseInputs(cfg, size, options.batch_size)


def measure_forms(
    forms: dict[str, nn.Module],
    inputs: Callable,
    options: Options,
    title: str = '',
    quiet: bool = False,
    sections: dict[str, Callable] = dict(),
) -> dict[str, Any]:
    """Measure models on the same inputs, in turn.

    Args:
        forms (dict): Models by name; ratios are against the first.
        inputs (Callable): Gives the i-th batch, see :mod:`.inputs`.
        options (Options): Those that are about more than the input.
        title (str): What the progress shows. Defaults to nothing.
        quiet (bool): Show no progress. Defaults to False.
        sections (dict): By the name of a model, a function that takes its backbone and a recorder,
            and returns a context in which parts of the backbone are timed. Defaults to none; of
            whole models the networks are timed.

    Returns:
        dict: ``count`` (batches measured), ``interrupted``, ``notes``, ``inputs`` (in words),
        ``shapes`` ((N, 3, H, W) of every batch), ``runs`` (the process of every batch),
        ``batch_size``, ``reference``, ``loading`` (milliseconds of every batch; empty for noise)
        and ``forms``: for each one :func:`~repa_mm.benchmark.timing.statistics`, and
        ``images_per_second`` (at the median), ``ratio_fair`` (to the vanilla with the fast
        attention), ``parameters``, ``weights_mib``, ``peak_mib`` (weights and the most that one
        call adds).
    """
    whole = options.part == 'model'
    rest = 'post-processing' if whole else 'rest' if sections else options.part
    recorder = Recorder(Clock(options.device), rest)
    # As many graphs of one function as sizes, in a sweep.
    if options.compile:
        torch._dynamo.reset()
    notes: list[str] = []
    shapes: list[list] = []
    memory: dict[str, int] = {}
    repeats = -(-options.num_images // inputs.batch_size)
    if inputs.real and repeats > len(inputs):
        notes.append(f'the data set has {len(inputs)} batches: some are measured more than once')
    first = next(iter(forms))

    def call_of(model: nn.Module) -> Callable:
        if options.part == 'backbone':
            return model.backbone
        if options.part == 'predict':
            return lambda data: model(data['inputs'], data['data_samples'], mode='predict')
        return model.test_step

    def load(index: int) -> Any:
        batch = inputs(index)
        if options.part == 'predict':
            batch = forms[first].data_preprocessor(copy.deepcopy(batch), False)
        shapes.append(shapes_of(batch))
        return batch

    times = Times(list(forms))
    unit = 'images' if inputs.batch_size == 1 else 'batches'
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(repeats, options.warmup, title, unit, quiet=quiet))
        stack.enter_context(torch.no_grad())
        for name, model in forms.items():
            how = options.amp, options.compile, inputs.real, options.channels_last
            parts = recorder if whole else None
            stack.enter_context(accelerated(model, *how, options.cuda_graphs, parts))
            if name in sections:
                stack.enter_context(sections[name](model.backbone, recorder))
        calls = {name: call_of(model) for name, model in forms.items()}
        try:
            # Before anything is timed: errors, and what is done only once.
            found = {}
            for name, call in calls.items():
                compiles = ', which compiles' * bool(options.compile)
                progress.say(f'first run of {name}{compiles}')
                batch = load(0)
                with explained(name, shapes_of(batch)):
                    result = call(copy.deepcopy(batch))
                if options.part != 'backbone' and 'pred_instances' in result[0]:
                    found[name] = sum(len(r.pred_instances) for r in result)
                if options.memory:
                    memory[name] = peak_bytes(call, copy.deepcopy(batch), options.device)[1]
            if found:
                counts = ', '.join(f'{name} {count}' for name, count in found.items())
                notes.append(f'boxes found in the first batch: {counts}')
            if measure(calls, load, 0, options.warmup, recorder, progress).interrupted:
                raise KeyboardInterrupt
            graphs = _num_graphs() if options.compile else 0
            shapes.clear()
            times = measure(calls, load, repeats, 0, recorder, progress)
            if options.compile and _num_graphs() > graphs:
                notes.append(
                    f'{_num_graphs() - graphs} graphs were compiled while measuring: use a longer '
                    '--warmup'
                )
        except KeyboardInterrupt:
            times.interrupted = True
    point: dict[str, Any] = dict(
        count=len(times),
        interrupted=times.interrupted,
        notes=notes,
        inputs=inputs.describe(),
        shapes=shapes[: len(times)],
        runs=[0] * len(times),
        batch_size=inputs.batch_size,
        reference=first,
        loading=times.data if inputs.real else [],
        forms={},
    )
    if not len(times):
        return point
    for name, model in forms.items():
        part_of = model.backbone if options.part == 'backbone' else model
        weights = weight_bytes(part_of)
        point['forms'][name] = form = dict(
            raw=times.raw[name],
            parameters=count_parameters(part_of),
            weights_mib=weights / 2**20,
            peak_mib=(weights + memory[name]) / 2**20 if name in memory else None,
        )
        if options.flops:
            form['macs'] = count_macs(part_of, (3, *parse_size(options.synthetic)))
    if options.flops:
        point['peak_tflops'] = peak_flops(options.device, options.amp) / 1e12
    _add_statistics(point)
    return point


def _add_statistics(point: dict[str, Any]) -> None:
    """Add what follows from the samples of a point."""
    raw = {name: form['raw'] for name, form in point['forms'].items()}
    for name, found in statistics(raw, point['reference'], point['runs']).items():
        form = point['forms'][name]
        form.update(found)
        form['images_per_second'] = 1e3 * point['batch_size'] / form['latency']['median']
        if FAIR in raw:
            form['ratio_fair'] = compare(raw[name]['total'], raw[FAIR]['total'], point['runs'])
        if 'macs' in form:
            form['tflops'] = 2e-12 * form['macs'] * form['images_per_second']


def _num_graphs() -> int:
    """Graphs that torch.compile has made so far."""
    from torch._dynamo.utils import counters

    return counters['stats']['unique_graphs']


def peak_flops(device: str = 'cpu', amp: str | None = None) -> float:
    """Operations per second in the product of two large matrices."""
    n = 8192 if torch.device(device).type == 'cuda' else 2048
    dtype = AMP_DTYPES[amp] if amp else torch.float32
    a, b = torch.randn(2, n, n, device=device).to(dtype)
    timer = Timer('a @ b', globals=dict(a=a, b=b), num_threads=torch.get_num_threads())
    return 2 * n**3 / timer.blocked_autorange(min_run_time=1).median
