"""Latency of the forms of a model, per image, in one run."""

import copy
import dataclasses
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.nn as nn

from repa_mm.benchmark.forms import (
    AMP_DTYPES,
    FAIR,
    accelerated,
    build_forms,
    check_device,
    explained,
    load_configs,
)
from repa_mm.benchmark.inputs import (
    DatasetInputs,
    NoiseInputs,
    TensorInputs,
    check_memory,
    parse_size,
    shapes_of,
)
from repa_mm.benchmark.memory import peak_bytes, weight_bytes
from repa_mm.benchmark.report import environment
from repa_mm.benchmark.timing import Clock, Progress, Recorder, Times, compare, measure, summarize
from repa_mm.engine.complexity import count_macs, count_parameters

PARTS = ('preprocessing', 'backbone', 'neck', 'head', 'post-processing')
SWEEPS = ('size', 'batch', 'idle-ratio')
RANDOM_DETECTOR = (
    'such a detector finds fewer boxes than a trained one, '
    'mostly none, so the time of its post-processing is '
    'not representative'
)


@dataclasses.dataclass
class Options:
    """How to measure; the fields are the options of tools/benchmark.py."""

    part: str = 'model'
    synthetic: str | None = None
    batch_size: int = 1
    num_images: int = 100
    warmup: int = 10
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


def parse_sweep(text: str | None) -> list[dict[str, str]]:
    """Points of a sweep: 'batch=1,2' gives [{'batch': '1'}, {'batch': '2'}].

    Raises:
        ValueError: If it is malformed.
    """
    if text is None:
        return [{}]
    key, _, values = text.partition('=')
    points = [value.strip() for value in values.split(',') if value.strip()]
    if key not in SWEEPS or not points:
        raise ValueError(
            f'--sweep {text!r} is malformed: write '
            'size=512x512,800x1344 or batch=1,2,4 or '
            'idle-ratio=0.25,0.5,0.75'
        )
    for point in points:
        if key == 'size':
            parse_size(point)
        elif key == 'batch' and not (point.isdecimal() and int(point)):
            raise ValueError(f'--sweep batch: {point!r} is no batch size')
        elif key == 'idle-ratio':
            _ratio(point)
    return [{key: point} for point in points]


def _ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ValueError(f'--sweep idle-ratio: {text!r} is no number from 0 to 1')
    return value


def benchmark(
    config: str,
    checkpoint: str | None = None,
    baseline: str | None = None,
    baseline_checkpoint: str | None = None,
    cfg_options: dict | None = None,
    options: Options | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Measure a model's training form, deploy form and vanilla counterpart.

    The forms take turns on every image. Latency is that of ``test_step`` on a
    loaded batch, as MMDetection's and MMSegmentation's own tools have it: from
    the images in memory to the predictions. Ctrl-C ends it early.

    Args:
        config (str): Path of a config.
        checkpoint (str, optional): Defaults to None: random weights.
        baseline (str, optional): Path of the vanilla counterpart's config.
        baseline_checkpoint (str, optional): Its weights.
        cfg_options (dict, optional): Values to override in the config.
        options (Options, optional): How to measure.
        quiet (bool): Show no progress. Defaults to False.

    Returns:
        dict: ``environment``, ``options``, ``notes``, ``interrupted``, the
        texts of the configs, and ``runs``: one for each point of the sweep, as
        :func:`measure_forms` returns it, with its ``point``.

    Raises:
        FileNotFoundError: If a file or the data set is missing.
        ValueError: If options do not fit each other, the model or the machine.
        CheckpointError: If a checkpoint does not fit.
        KeyboardInterrupt: If it ended before anything was measured.
    """
    options = options or Options()
    points = parse_sweep(options.sweep)
    for name in ('num_images', 'batch_size'):
        if getattr(options, name) < 1:
            raise ValueError(f'--{name.replace("_", "-")} must be at least 1')
    if options.flops and options.part != 'backbone':
        raise ValueError('--flops counts those of a backbone: add --part backbone')
    if options.warmup < 0:
        raise ValueError('--warmup must not be negative')
    # Before models are built.
    for point in points:
        size = point.get('size', options.synthetic)
        if size:
            check_memory(parse_size(size), int(point.get('batch', options.batch_size)))
    set_machine(options.device, options.threads, options.tf32, options.amp)
    if options.cuda_graphs and torch.device(options.device).type != 'cuda':
        raise ValueError('--cuda-graphs needs --device cuda')
    cfg, baseline_cfg = load_configs(config, baseline, cfg_options)
    if 'idle-ratio' in points[0]:
        if checkpoint:
            raise ValueError(
                '--sweep idle-ratio builds models of other shapes: it goes without a checkpoint'
            )
        if 'idle_ratio' not in cfg.model.get('backbone', {}):
            raise ValueError(
                '--sweep idle-ratio needs a config whose model.backbone has an idle_ratio'
            )
    notes = []
    if not checkpoint:
        notes.append('weights are random, BatchNorm statistics too')
        if cfg.default_scope == 'mmdet' and options.part == 'model':
            notes.append(RANDOM_DETECTOR)
    result: dict[str, Any] = dict(
        tool='benchmark',
        config=config,
        checkpoint=checkpoint,
        baseline=baseline,
        baseline_checkpoint=baseline_checkpoint,
        cfg_options=cfg_options or {},
        options=dataclasses.asdict(options),
        environment=environment(options.device),
        config_text=cfg.pretty_text,
        baseline_text=baseline_cfg.pretty_text if baseline else None,
        notes=notes,
        interrupted=False,
        runs=[],
    )
    forms = None
    try:
        for point in points:
            if forms is None or 'idle-ratio' in point:
                if 'idle-ratio' in point:
                    cfg.model.backbone.idle_ratio = _ratio(point['idle-ratio'])
                forms = build_forms(
                    cfg,
                    checkpoint,
                    baseline_cfg,
                    baseline_checkpoint,
                    options.fair,
                    options.device,
                    notes,
                )
            here = dataclasses.replace(
                options,
                synthetic=point.get('size', options.synthetic),
                batch_size=int(point.get('batch', options.batch_size)),
            )
            title = ' '.join(f'{k} {v}' for k, v in point.items())
            run = measure_forms(forms, make_inputs(cfg, here), here, title, quiet)
            if options.flops and run['count']:
                add_flops(run, forms, here)
            if run['count']:
                result['runs'].append(dict(point=point, **run))
            if run['interrupted']:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        if not result['runs']:
            raise
        result['interrupted'] = True
    for run in result['runs']:
        for note in run.pop('notes'):
            if note not in notes:
                notes.append(note)
    return result


def set_machine(
    device: str, threads: int | None = None, tf32: bool = False, amp: str | None = None
) -> None:
    """Check the device, and set the process's threads and TF32.

    Raises:
        ValueError: If there is no such device, or it lacks the type.
    """
    if threads is not None:
        most = 8 * (os.cpu_count() or 1)
        if not 1 <= threads <= most:
            raise ValueError(f'--threads must be from 1 to {most}, 8 for each core of this machine')
        torch.set_num_threads(threads)
    found = check_device(device, amp)
    if tf32 and found.type != 'cuda':
        raise ValueError('--tf32 is about NVIDIA GPUs: use it with --device cuda')
    # Both, since PyTorch's own defaults differ: off, and on for convolutions.
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


def make_inputs(cfg, options: Options) -> Callable:
    """The batches that the options ask for."""
    if options.part == 'backbone':
        if not options.synthetic:
            raise ValueError('--part backbone takes noise: add --synthetic 224x224')
        return TensorInputs(
            parse_size(options.synthetic), options.batch_size, options.device, options.channels_last
        )
    if options.synthetic:
        return NoiseInputs(cfg, parse_size(options.synthetic), options.batch_size)
    return DatasetInputs(cfg, options.batch_size)


def measure_forms(
    forms: dict[str, nn.Module],
    inputs: Callable,
    options: Options,
    title: str = '',
    quiet: bool = False,
    recorder: Recorder | None = None,
) -> dict[str, Any]:
    """Measure models on the same inputs, in turn.

    Args:
        forms (dict): Models by name; ratios are against the first.
        inputs (Callable): Gives the i-th batch, see :mod:`.inputs`.
        options (Options): Those that are about more than the input.
        title (str): What the progress shows.
        quiet (bool): Show no progress. Defaults to False.
        recorder (Recorder, optional): Defaults to one with the device's clock.

    Returns:
        dict: ``count`` (batches measured), ``interrupted``, ``notes``,
        ``inputs`` (in words), ``shapes`` ((N, 3, H, W) of every batch),
        ``batch_size``, ``reference``, ``data`` (statistics of loading, or
        None for noise) and ``forms``: for each one ``latency`` (statistics,
        milliseconds a batch), ``parts`` (the same of every part; their means
        sum to the mean latency), ``images_per_second`` (at the median),
        ``ratio`` (to the reference, with its interval), ``ratio_fair`` (to the
        vanilla with the fast attention), ``parameters``, ``weights_mib``,
        ``peak_mib`` (weights and the most that one call adds)
        and ``raw``, the times of every batch in milliseconds.
    """
    clock = Clock(options.device)
    recorder = recorder or Recorder(clock, 'post-processing')
    backbone_only = options.part == 'backbone'
    if backbone_only:
        recorder.rest = 'backbone'
    # As many graphs of one function as sizes, in a sweep.
    if options.compile:
        torch._dynamo.reset()
    notes: list[str] = []
    shapes: list[list] = []
    memory: dict[str, int] = {}
    repeats = -(-options.num_images // inputs.batch_size)
    if inputs.real and repeats > len(inputs):
        notes.append(f'the data set has {len(inputs)} batches: some are measured more than once')
    times = Times(list(forms))

    def call_of(model: nn.Module) -> Callable:
        if backbone_only:
            return model.backbone
        return model.test_step

    def load(index: int) -> Any:
        batch = inputs(index)
        shapes.append(shapes_of(batch))
        return batch

    progress = (
        None
        if quiet
        else Progress(
            repeats, options.warmup, title, 'images' if inputs.batch_size == 1 else 'batches'
        )
    )
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for model in forms.values():
            stack.enter_context(
                accelerated(
                    model,
                    options.amp,
                    options.compile,
                    inputs.dynamic,
                    options.channels_last,
                    options.cuda_graphs,
                    None if backbone_only else recorder,
                )
            )
        calls = {name: call_of(model) for name, model in forms.items()}
        try:
            # Before anything is timed: errors, and what is done only once.
            found = {}
            for name, call in calls.items():
                if progress:
                    progress.say(
                        f'first run of the {name} form' + ', which compiles' * bool(options.compile)
                    )
                batch = copy.deepcopy(inputs(0))
                with explained(name, shapes_of(batch)):
                    result = call(batch)
                if not backbone_only and 'pred_instances' in result[0]:
                    found[name] = sum(len(r.pred_instances) for r in result)
            if found:
                notes.append(
                    'boxes found in the first batch: '
                    + ', '.join(f'{name} {count}' for name, count in found.items())
                )
            if options.memory:
                for name, call in calls.items():
                    memory[name] = peak_bytes(call, copy.deepcopy(inputs(0)), options.device)[1]
            warm = measure(calls, load, 0, options.warmup, recorder, progress)
            if warm.interrupted:
                raise KeyboardInterrupt
            graphs = _num_graphs() if options.compile else 0
            shapes.clear()
            times = measure(calls, load, repeats, 0, recorder, progress)
            if options.compile and _num_graphs() > graphs:
                notes.append(
                    f'{_num_graphs() - graphs} graphs were compiled while '
                    'measuring: use a longer --warmup'
                )
        except KeyboardInterrupt:
            times.interrupted = True
    if progress:
        progress.close()
    return dict(
        summarize_times(
            times,
            inputs.batch_size,
            next(iter(forms)),
            memory,
            forms,
            'backbone' if backbone_only else None,
        ),
        notes=notes,
        inputs=inputs.describe(),
        shapes=shapes[: len(times)],
        data=summarize(1e3 * np.array(times.data)) if inputs.real else None,
    )


def _num_graphs() -> int:
    """Graphs that torch.compile has made so far."""
    from torch._dynamo.utils import counters

    return counters['stats']['unique_graphs']


def add_flops(run: dict[str, Any], forms: dict[str, nn.Module], options: Options) -> None:
    """Add arithmetic speeds to what :func:`measure_forms` returned.

    ``peak_tflops``, that of the product of two large matrices in the same
    type, and for each form ``macs`` (of one image, weights only) and
    ``tflops`` (two per multiply-add, at the median).
    """
    run['peak_tflops'] = peak_flops(options.device, options.amp) / 1e12
    for name, form in run['forms'].items():
        form['macs'] = count_macs(forms[name].backbone, (3, *parse_size(options.synthetic)))
        form['tflops'] = 2e-12 * form['macs'] * form['images_per_second']


def peak_flops(device: str = 'cpu', amp: str | None = None, repeats: int = 9) -> float:
    """Operations per second in the product of two large matrices."""
    n = 8192 if torch.device(device).type == 'cuda' else 2048
    dtype = AMP_DTYPES[amp] if amp else torch.float32
    a, b = torch.randn(2, n, n, device=device).to(dtype)
    times = measure(
        dict(product=lambda _: a @ b), lambda _: None, repeats, 3, Recorder(Clock(device))
    )
    return 2 * n**3 / float(np.median(times.totals['product']))


def summarize_times(
    times: Times,
    batch_size: int,
    reference: str,
    memory: dict[str, int],
    forms: dict[str, nn.Module],
    only: str | None = None,
) -> dict[str, Any]:
    """What :func:`measure_forms` returns about times."""
    result: dict[str, Any] = dict(
        count=len(times),
        interrupted=times.interrupted,
        batch_size=batch_size,
        reference=reference,
        forms={},
    )
    if not len(times):
        return result
    times_of = {n: 1e3 * np.array(v) for n, v in times.totals.items()}
    for name, model in forms.items():
        total = times_of[name]
        parts = {
            part: 1e3 * np.array(times.parts[name][part])
            for part in PARTS
            if part in times.parts[name]
        }
        part_of = model.backbone if only else model
        weights = weight_bytes(part_of)
        latency = summarize(total)
        result['forms'][name] = dict(
            latency=latency,
            parts={part: summarize(v) for part, v in parts.items()},
            images_per_second=1e3 * batch_size / latency['median'],
            ratio=compare(total, times_of[reference]),
            ratio_fair=compare(total, times_of[FAIR]) if FAIR in forms else None,
            parameters=count_parameters(part_of),
            weights_mib=weights / 2**20,
            peak_mib=(weights + memory[name]) / 2**20 if name in memory else None,
            raw=dict(latency=total.tolist(), **{part: v.tolist() for part, v in parts.items()}),
        )
    return result
