"""The complexity tables of the RePaFormer paper beside our own counts.

``paper_tables.csv`` holds what the paper says: tables 1, 2, 4 and 8 of `RePaViT
<https://arxiv.org/abs/2505.21847>`_, at 224x224 with 1000 classes, in millions of parameters and
in GMACs. LV-ViT's idle ratio, 0.75 in the paper, is 2/3: see
:class:`~repa_mm.models.lvvit.RePaLVViT`.
"""

import csv
import os.path as osp
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch.overrides import TorchFunctionMode

from repa_mm.benchmark.tables import markdown
from repa_mm.engine.complexity import OperationCounter, count_parameters, run_counted
from repa_mm.paths import config_path
from repa_mm.run import load_config


class Reported(NamedTuple):
    """One row of the paper's tables; the idle ratio of a vanilla model is None."""

    idle_ratio: float | None
    form: str
    parameters: float
    gmacs: float


def _read() -> tuple[dict[str, list[Reported]], dict[str, str]]:
    reported: dict[str, list[Reported]] = {}
    configs = {}
    with open(osp.join(osp.dirname(__file__), 'paper_tables.csv'), encoding='utf-8') as file:
        for row in csv.DictReader(file):
            ratio = float(Fraction(row['idle_ratio'])) if row['idle_ratio'] else None
            reported.setdefault(row['model'], []).append(
                Reported(ratio, row['form'], float(row['parameters']), float(row['gmacs']))
            )
            configs[row['model']] = row['config']
    return reported, configs


# By the paper's name of a model: its rows, and our config of its RePa counterpart.
REPORTED, CONFIGS = _read()


class OnMeta(TorchFunctionMode):
    """Makes tensors without memory, for models of which only shapes matter.

    As ``torch.device('meta')``, but for the few numbers that a model reads while it is built:
    Swin's drop path rates.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        with torch.device('cpu' if func is torch.linspace else 'meta'):
            return func(*args, **(kwargs or {}))


class PaperCounter(OperationCounter):
    """Counts as the paper's released code does, too, with ptflops as its profiler.

    Attributes:
        profiled (int): The multiply-adds of weights; one operation for every bias that is added,
            two for every element that a BatchNorm normalizes, one for LayerNorm and softmax, two
            for every element that goes into an activation or a pooling (ptflops sees the module
            and the function in it), none for PoolFormer's GroupNorm (there a class of its own,
            which ptflops does not know). The attention products do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self._others = 0

    @property
    def profiled(self) -> int:
        return self.macs[''] + self._others

    def watch(self, model: nn.Module) -> None:
        super().watch(model)

        def count_idle(ffn, args, out):
            # The training form of the released code activates all channels, and then selects.
            self._others += 2 * ffn.num_idle * (out.numel() // ffn.embed_dims)

        for module in model.modules():
            if hasattr(module, 'num_idle'):
                module.register_forward_hook(count_idle)

    def count(self, func, args: tuple, kwargs: dict, out) -> None:
        if func is F.linear or func is F.conv2d:
            bias = args[2] if len(args) > 2 else kwargs.get('bias')
            self._others += 0 if bias is None else out.numel()
        elif func is F.batch_norm:
            self._others += 2 * out.numel()
        elif func is F.layer_norm or func in (F.softmax, torch.softmax, torch.Tensor.softmax):
            self._others += out.numel()
        elif func in (F.gelu, F.relu, F.avg_pool2d):
            self._others += 2 * args[0].numel()


class Row(NamedTuple):
    """One row of the tables. Parameters in millions, operations in 1e9."""

    model: str
    reported: Reported
    params: float
    gmacs: float
    profiled: float


def build(model: str, idle_ratio: float | None, form: str) -> nn.Module:
    """A model of the paper, with its classifier.

    Args:
        model (str): One of ``REPORTED``.
        idle_ratio (float, optional): None for the vanilla model.
        form (str): 'vanilla', 'training' or 'deploy'.

    Returns:
        nn.Module: An mmpretrain ``ImageClassifier``.

    Raises:
        ValueError: If there is no such model.
    """
    if model not in REPORTED:
        raise ValueError(f'model must be one of {", ".join(REPORTED)}, but got {model!r}')
    cfg = load_config(config_path(CONFIGS[model])).model
    backbone = cfg.backbone
    if form == 'vanilla':
        # What only RePa models have; LV-ViT is of this repository in any form.
        for key in ('idle_ratio', 'token_norm'):
            backbone.pop(key, None)
        backbone.type = backbone.type.removeprefix('RePa')
        if backbone.type != 'LVViT':
            backbone.type = f'mmpretrain.{backbone.type}'
    else:
        backbone.update(idle_ratio=idle_ratio, deploy=form == 'deploy')
        if 'Swin' in backbone.type:  # the attention of the released code
            backbone.fast_attention = False
    return MODELS.build(cfg)


def paper_table(models: Iterable[str] = REPORTED) -> Iterator[Row]:
    """Count every row of the paper's complexity tables.

    Args:
        models (Iterable[str]): Only these. Defaults to all.

    Yields:
        Row: In the order of ``REPORTED``.
    """
    for name in models:
        for reported in REPORTED[name]:
            with OnMeta():
                model = build(name, reported.idle_ratio, reported.form)
            counter = PaperCounter()
            run_counted(model, (3, 224, 224), counter=counter)
            gmacs, profiled = counter.macs[''] / 1e9, counter.profiled / 1e9
            yield Row(name, reported, count_parameters(model) / 1e6, gmacs, profiled)


def paper_table_text(rows: Iterable[Row]) -> str:
    """A Markdown table of the rows of :func:`paper_table`."""
    cells = [['model', 'idle ratio', 'form', 'paper: M', 'ours: M', 'paper: GMACs']]
    cells[0] += ['as profiled there', 'weights only']
    for row in rows:
        ratio, form, params, gmacs = row.reported
        cells.append([row.model, '' if ratio is None else f'{ratio:.2f}', form])
        cells[-1] += [f'{params}', f'{row.params:.2f}']
        cells[-1] += [f'{gmacs}', f'{row.profiled:.2f}', f'{row.gmacs:.2f}']
    return '\n'.join(markdown(cells))
