"""The table of latencies that `tools/benchmark.py` prints."""

from collections.abc import Sequence

import numpy as np
import torch
from mmengine.logging import MMLogger

from repa_mm.benchmark.complexity import input_channels
from repa_mm.benchmark.timing import measure, show, show_machine
from repa_mm.benchmark.variants import (
    COLUMNS,
    STOCK,
    autocasting,
    calls_on_noise,
    compile_,
    exported_on_noise,
    latency_rows,
    variants,
)
from repa_mm.config import load_config
from repa_mm.export import ExportedModel
from repa_mm.faster import faster_on_gpu_
from repa_mm.opening import read_images
from repa_mm.surgery import copied


@torch.no_grad()
def show_latency(
    config: str,
    checkpoint: str | None = None,
    baseline: str | None = None,
    part: str = 'predict',
    exported: Sequence[str] = (),
    dataset: int | None = None,
    images: str | None = None,
    input_shape: Sequence[int] = (800, 1344),
    batch_size: int = 1,
    repeats: int = 10,
    device: str = 'cpu',
    amp: str | None = None,
    compile: bool = False,
    cfg_options: dict | None = None,
) -> None:
    """Time a model in turn with a baseline and exported files, and print a table.

    Args:
        config (str): The model's config: a path, or the name of an installed config.
        checkpoint (str, optional): Its checkpoint, in either form. Defaults to random weights.
        baseline (str, optional): Config of the stock model, with random weights.
        part (str): 'predict', the whole model with post-processing, or its 'backbone'.
        exported (Sequence[str]): Exported files, see
            :func:`~repa_mm.benchmark.variants.exported_on_noise`.
        dataset (int, optional): Number of images of the config's test data to run, each once.
            Defaults to noise.
        images (str, optional): A folder of images instead of the test data.
        input_shape (Sequence[int]): Height and width of images of noise in pixels.
        batch_size (int): Number of images of noise.
        repeats (int): Number of turns on noise.
        device (str): Device of the models in PyTorch.
        amp (str, optional): Run these under autocast to 'float16' or 'bfloat16'.
        compile (bool): Also run each of these with ``torch.compile``.
        cfg_options (dict, optional): Values to override in the model's config.
    """
    show_machine()
    MMLogger.get_current_instance().setLevel('WARNING')  # hides where weights come from
    cfg = load_config(config, cfg_options)
    models = variants(cfg, checkpoint, load_config(baseline) if baseline else None)
    for name, model in models.items():
        model.to(device)
        if name != STOCK:
            faster_on_gpu_(model)
    if compile:
        models |= {f'{n}, compiled': compile_(copied(m)) for n, m in models.items()}
    if dataset:
        argument = read_images(cfg, 'test', dataset, images)
        number, how = len(argument), f'{len(argument)} images of {images or "the test data"}'
        calls = {name: model.test_step for name, model in models.items()}
    else:
        channels = input_channels(next(iter(models.values())))
        number, how = repeats, f'{part}, {"x".join(map(str, (batch_size, channels, *input_shape)))}'
        calls, argument = calls_on_noise(models, part, tuple(input_shape), batch_size)
    calls = {name: autocasting(call, amp, device) for name, call in calls.items()}
    for name in exported:
        if dataset:
            file, _, precision = name.partition(':')
            preprocessor = next(iter(models.values())).data_preprocessor
            calls[name] = ExportedModel(file, preprocessor, precision or None).test_step
        else:
            calls[name] = exported_on_noise(name, tuple(input_shape), batch_size, channels)
    times = measure(calls, argument, number, per_turn=bool(dataset))
    rows = latency_rows(times, batch_size)
    columns = [column.format(next(iter(calls))) for column in COLUMNS]
    if dataset:  # images differ
        columns.insert(2, 'quartiles')
        for row, values in zip(rows, times.values()):
            row[2] = f'{1e3 / values.mean():.2f}'
            row.insert(2, '{:.1f} to {:.1f}'.format(*np.percentile(values, [25, 75])))
    show(f'{config}, {how}, {amp or "float32"}, medians of {number} turns [95 %]', columns, rows)
