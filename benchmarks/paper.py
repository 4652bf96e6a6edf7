"""The paper's tables 2, 3 and 4 and its figure 3: models beside their vanilla counterparts."""

import csv
import gc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from mmengine.config import Config

from repa_mm.benchmark.complexity import count
from repa_mm.benchmark.profile import ffn_modules, measure_shares
from repa_mm.benchmark.tables import change
from repa_mm.benchmark.timing import measure
from repa_mm.benchmark.variants import OURS, VANILLA, merged, with_our_parts
from repa_mm.paths import config_path
from repa_mm.run import build_model

PART = 'FFNs'  # whose share is measured
COLUMNS = (
    *('model', 'idle ratio', 'parameters, M', 'GMACs', 'ms', 'against stock', 'by the merge'),
    'FFNs, %',
)


def paper_rows() -> list[dict[str, str]]:
    """Return parameters (M) and GMACs of the paper's tables 1, 2, 4 and 8, with our configs."""
    with open(Path(__file__).with_name('paper_tables.csv')) as file:
        return list(csv.DictReader(file))


def paper_configs() -> list[str]:
    """Return the paths of the configs of the paper's 15 models."""
    return [config_path(name) for name in dict.fromkeys(row['config'] for row in paper_rows())]


def counterpart(cfg: Config) -> nn.Module:
    """Build the vanilla counterpart of a model: the one whose weights would fill its forms.

    Args:
        cfg (Config): Of a model whose backbone is a :class:`~repa_mm.models.Restructured`.

    Returns:
        nn.Module: In eval mode, with random weights.
    """
    model = build_model(cfg)
    model.backbone = model.backbone.build_ordinary()
    gc.collect()  # references of mmpretrain's backbones go in circles
    model.eval()
    return model


@torch.no_grad()
def measure_pairs(
    cfg: Config, idle_ratios: Sequence[float], images: torch.Tensor, repeats: int, warmup: int = 1
) -> list[list[str]]:
    """Measure a model, without post-processing, and its vanilla counterpart in turn.

    Args:
        cfg (Config): Of the model, as for :func:`counterpart`.
        idle_ratios (Sequence[float]): To measure the model with. None of them: the config's own.
        images (torch.Tensor): (B, 3, H, W), on the device to measure.
        repeats (int): Number of turns.
        warmup (int): Number of turns before those. Defaults to 1.

    Returns:
        list: For each idle ratio a row of :data:`COLUMNS`. Parameters, and multiply-adds of one
        image, are those of the vanilla model, the training form and the deploy form; times, and
        shares of the FFNs in them, those of the vanilla model and the deploy form.
    """
    gc.collect()  # the models of another pair
    deployed, sizes = {}, {}
    for ratio in idle_ratios or [cfg.model.backbone.get('idle_ratio')]:
        if idle_ratios:
            cfg.model.backbone.idle_ratio = ratio
        model = build_model(cfg).to(images.device)
        name = '' if ratio is None else f'{ratio:.3g}'
        training = count(model, images[:1])
        deployed[name] = merged(model)
        sizes[name] = training, count(model, images[:1])
    models = with_our_parts(counterpart(cfg).to(images.device))
    vanilla = count(models[VANILLA], images[:1])
    models.update(deployed)
    times = measure(models, images, repeats, warmup)
    ours = times.get(OURS, times[VANILLA])
    models.pop(OURS, None)
    parts = {name: {PART: ffn_modules(model)} for name, model in models.items()}
    whole, spent = measure_shares(models, parts, images, repeats, warmup)
    rows = []
    for name, forms in sizes.items():
        pair, counts = (VANILLA, name), (vanilla, *forms)
        rows.append(
            [
                Path(cfg.filename).stem,
                name,
                ' / '.join(f'{parameters / 1e6:.2f}' for parameters, _ in counts),
                ' / '.join(f'{macs / 1e9:.2f}' for _, macs in counts),
                ' / '.join(f'{np.median(times[one]):.1f}' for one in pair),
                change(times[name], times[VANILLA]),
                change(times[name], ours),
                ' / '.join(f'{100 * np.median(spent[one][PART] / whole[one]):.1f}' for one in pair),
            ]
        )
    return rows
