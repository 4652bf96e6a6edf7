"""Which layers the time of a backbone goes to (figure 3 of the paper)."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn as nn

from repa_mm.benchmark.forms import build_model, explained
from repa_mm.benchmark.inputs import TensorInputs, check_memory, parse_size
from repa_mm.benchmark.latency import set_machine
from repa_mm.benchmark.report import environment
from repa_mm.benchmark.timing import Clock, Progress, Recorder, measure, summarize
from repa_mm.reparam import reparameterize
from repa_mm.runtime import load_config

LAYERS = ('patch embedding', 'token mixer', 'FFN', 'rest')
# In a block of a MetaFormer, the names of what mixes tokens and of the FFN,
# each with the norm before it.
TOKEN_MIXERS = ('attn', 'token_mixer', 'token_mix')
FFNS = ('ffn', 'channel_mix', 'mlp')
MIXER_NORMS, FFN_NORMS = ('norm1', 'ln1'), ('norm2', 'ln2')


def layers(backbone: nn.Module) -> list[tuple]:
    """The timed modules of a MetaFormer backbone.

    Returns:
        list: Pairs of 'patch embedding', 'token mixer' or 'FFN' and a module.

    Raises:
        ValueError: If the backbone has no such blocks.
    """
    found = []
    patch_embed = getattr(backbone, 'patch_embed', None)
    if patch_embed is not None:
        found.append(('patch embedding', patch_embed))
    for block in backbone.modules():
        children = dict(block.named_children())
        if not (set(TOKEN_MIXERS) & set(children) and set(FFNS) & set(children)):
            continue
        for names, layer in (
            (TOKEN_MIXERS + MIXER_NORMS, 'token mixer'),
            (FFNS + FFN_NORMS, 'FFN'),
        ):
            found += [(layer, children[n]) for n in names if n in children]
    if not any(layer == 'FFN' for layer, _ in found):
        raise ValueError(
            f'{type(backbone).__name__} has no blocks of a token '
            f'mixer ({", ".join(TOKEN_MIXERS)}) and an FFN '
            f'({", ".join(FFNS)})'
        )
    return found


@contextmanager
def timed_layers(backbone: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Count the time of a backbone's layers as sections of a recorder."""
    modules = layers(backbone)
    for layer, module in modules:
        module.forward = recorder.wrap(module.forward, layer)
    try:
        yield
    finally:
        for _, module in modules:
            del module.forward


def profile(
    configs: Sequence[str],
    size: str = '224x224',
    batch_size: int = 1,
    num_images: int = 30,
    warmup: int = 5,
    device: str = 'cpu',
    threads: int | None = None,
    tf32: bool = False,
    forms: Sequence[str] = ('deploy',),
    quiet: bool = False,
) -> dict[str, Any]:
    """Split the time of backbones into layers.

    Each model runs with timers around its layers and without, in turn with
    all others, so that the cost of the timers shows. Weights are random.

    Args:
        configs (Sequence[str]): Paths of configs, vanilla or RePa.
        size (str): Of the images, 'HEIGHTxWIDTH'.
        batch_size (int): Images in a batch.
        num_images (int): Batches to measure.
        warmup (int): Batches before that.
        device (str): 'cpu', 'cuda', ...
        threads (int, optional): Of the CPU.
        tf32 (bool): Whether float32 products use TF32.
        forms (Sequence[str]): Of RePa models: 'training', 'deploy' or both.
        quiet (bool): Show no progress. Defaults to False.

    Returns:
        dict: ``environment``, ``options``, ``interrupted``, ``count`` and
        ``models``: for each one ``layers`` (statistics, milliseconds; the
        means sum to ``with_timers``' mean), ``share`` (of each layer, sums to
        1), ``with_timers`` and ``total`` (statistics with and without them).

    Raises:
        FileNotFoundError, ValueError: If a config or an option is unusable.
        KeyboardInterrupt: If it ended before anything was measured.
    """
    options = {k: v for k, v in locals().items() if k != 'quiet'}
    if batch_size < 1 or num_images < 1 or warmup < 0:
        raise ValueError('--batch-size and --num-images must be at least 1, --warmup at least 0')
    parsed = parse_size(size)
    check_memory(parsed, batch_size)
    set_machine(device, threads, tf32)
    models: dict[str, nn.Module] = {}
    for path in configs:
        cfg = load_config(path)
        model = build_model(cfg, device=device).backbone
        name = path.rpartition('/')[2].rpartition('.')[0]
        try:
            merged = reparameterize(model)
        except ValueError:
            models[name] = model
            continue
        for form in forms:
            models[f'{name}, {form}'] = merged if form == 'deploy' else model
    inputs = TensorInputs(parsed, batch_size, device)
    recorder = Recorder(Clock(device))

    def without_timers(model: nn.Module):

        def call(x: torch.Tensor):
            recorder.paused = True
            try:
                return model(x)
            finally:
                recorder.paused = False

        return call

    calls = {}
    for name, model in models.items():
        calls[name] = without_timers(model)
        calls[f'{name} (timers)'] = model
    for name, model in models.items():
        with explained(name, (batch_size, 3, *parsed)), torch.no_grad():
            model(inputs(0))
    progress = None if quiet else Progress(num_images, warmup, unit='batches', show=list(models))
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for model in models.values():
            stack.enter_context(timed_layers(model, recorder))
        times = measure(calls, inputs, num_images, warmup, recorder, progress)
    if progress:
        progress.close()
    if not len(times):
        raise KeyboardInterrupt
    result: dict[str, Any] = dict(
        tool='profile_latency',
        options=options,
        environment=environment(device),
        interrupted=times.interrupted,
        count=len(times),
        models={},
    )
    for name in models:
        timed = 1e3 * np.array(times.totals[f'{name} (timers)'])
        parts = times.parts[f'{name} (timers)']
        raw = {layer: 1e3 * np.array(parts[layer]) for layer in LAYERS if layer in parts}
        total = 1e3 * np.array(times.totals[name])
        result['models'][name] = dict(
            layers={layer: summarize(v) for layer, v in raw.items()},
            share={layer: float(v.sum() / timed.sum()) for layer, v in raw.items()},
            with_timers=summarize(timed),
            total=summarize(total),
            raw=dict(
                total=total.tolist(),
                with_timers=timed.tolist(),
                **{layer: v.tolist() for layer, v in raw.items()},
            ),
        )
    return result
