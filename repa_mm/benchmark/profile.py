"""Which layers the time of a backbone goes to (figure 3 of the paper)."""

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.nn as nn

from repa_mm.benchmark.latency import Options, check_options, make_inputs, measure_forms
from repa_mm.benchmark.machine import environment
from repa_mm.benchmark.timing import Recorder
from repa_mm.benchmark.variants import build_variants
from repa_mm.run import load_config

# In a block of a MetaFormer, the names of what mixes tokens and of the FFN, each with the norm
# before it.
TOKEN_MIXERS = ('attn', 'token_mixer', 'token_mix')
FFNS = ('ffn', 'channel_mix', 'mlp')
LAYERS = {'token mixer': (*TOKEN_MIXERS, 'norm1', 'ln1'), 'FFN': (*FFNS, 'norm2', 'ln2')}


def timed_modules(backbone: nn.Module) -> list[tuple]:
    """The timed modules of a MetaFormer backbone.

    Returns:
        list: Pairs of 'patch embedding', 'token mixer' or 'FFN' and a module.

    Raises:
        ValueError: If the backbone has no such blocks.
    """
    found = []
    for name, module in backbone.named_modules():
        if name == 'patch_embed':
            found.append(('patch embedding', module))
        children = dict(module.named_children())
        if set(TOKEN_MIXERS) & set(children) and set(FFNS) & set(children):
            for layer, names in LAYERS.items():
                found += [(layer, children[n]) for n in names if n in children]
    if not any(layer == 'FFN' for layer, _ in found):
        raise ValueError(
            f'{type(backbone).__name__} has no blocks of a token mixer ({", ".join(TOKEN_MIXERS)}) '
            f'and an FFN ({", ".join(FFNS)})'
        )
    return found


@contextmanager
def timed_layers(backbone: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Count the time of a backbone's layers as sections of a recorder."""
    modules = timed_modules(backbone)
    for layer, module in modules:
        module.forward = recorder.section(layer)(module.forward)
    try:
        yield
    finally:
        for _, module in modules:
            del module.forward


def profile(
    configs: Sequence[str],
    options: Options,
    forms: Sequence[str] = ('deploy',),
    quiet: bool = False,
) -> dict[str, Any]:
    """Split the time of backbones into layers.

    Each model runs with timers around its layers and without, in turn with all others, so that the
    cost of the timers shows. Weights are random.

    Args:
        configs (Sequence[str]): Paths of configs, vanilla or RePa.
        options (Options): Of these, ``synthetic``, ``batch_size``, ``num_images``, ``warmup``,
            ``device``, ``threads`` and ``tf32``.
        forms (Sequence[str]): Of RePa models: 'training', 'deploy' or both.
        quiet (bool): Show no progress. Defaults to False.

    Returns:
        dict: ``environment``, ``options``, ``interrupted``, ``count`` and ``models``: for each one
        ``layers`` (statistics, milliseconds; the means sum to ``with_timers``' mean), ``share`` (of
        each layer, sums to 1), ``with_timers`` and ``total`` (statistics with and without them).

    Raises:
        FileNotFoundError, ValueError: If a config or an option is unusable.
        KeyboardInterrupt: If it ended before anything was measured.
    """
    options = dataclasses.replace(options, part='backbone', memory=False)
    check_options(options)
    models: dict[str, nn.Module] = {}
    for path in configs:
        for form, model in build_variants(load_config(path), device=options.device).items():
            if form == 'vanilla' or form in forms:
                models[Path(path).stem + f', {form}' * (form != 'vanilla')] = model
    # In turn with copies, around whose layers the timers are.
    copies = {f'{name} (timers)': copy.deepcopy(model) for name, model in models.items()}
    sections = dict.fromkeys(copies, timed_layers)
    point = measure_forms(
        {**models, **copies}, make_inputs(None, options), options, quiet=quiet, sections=sections
    )
    if not point['count']:
        raise KeyboardInterrupt
    result: dict[str, Any] = dict(
        tool='profile_latency',
        options=dataclasses.asdict(options),
        environment=environment(options.device),
        interrupted=point['interrupted'],
        count=point['count'],
        models={},
    )
    for name in models:
        timed, total = (point['forms'][key] for key in (f'{name} (timers)', name))
        layers = timed['parts']
        result['models'][name] = dict(
            layers=layers,
            share={layer: v['mean'] / timed['latency']['mean'] for layer, v in layers.items()},
            with_timers=timed['latency'],
            total=total['latency'],
            raw=dict(total=total['raw'], with_timers=timed['raw']),
        )
    return result
