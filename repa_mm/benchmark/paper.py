"""The complexity tables of the RePaFormer paper beside our own counts.

``REPORTED`` holds what the paper says: tables 1, 2, 4 and 8 of `RePaViT
<https://arxiv.org/abs/2505.21847>`_, at 224x224 with 1000 classes.
"""

from collections.abc import Iterable, Iterator
from decimal import ROUND_HALF_UP, Decimal
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch.overrides import TorchFunctionMode

from repa_mm.engine.complexity import count_parameters

# idle ratio, form ('vanilla', 'training', 'deploy'), parameters (M), GMACs.
# LV-ViT's idle ratio, 0.75 in the paper, is 2/3: see RePaLVViT.
REPORTED = {
    'DeiT-Tiny': [
        (None, 'vanilla', 5.7, 1.1),
        (1.0, 'deploy', 2.6, 0.5),
        (0.75, 'training', 5.7, 1.1),
        (0.75, 'deploy', 3.5, 0.6),
        (0.50, 'deploy', 4.4, 0.8),
        (0.25, 'deploy', 5.3, 1.0),
    ],
    'DeiT-Small': [
        (None, 'vanilla', 22.1, 4.3),
        (1.0, 'deploy', 9.6, 1.8),
        (0.75, 'training', 22.1, 4.3),
        (0.75, 'deploy', 13.2, 2.5),
        (0.50, 'deploy', 16.7, 3.2),
        (0.25, 'deploy', 20.3, 3.9),
    ],
    'DeiT-Base': [
        (None, 'vanilla', 86.6, 16.9),
        (1.0, 'deploy', 37.0, 7.1),
        (0.75, 'training', 86.6, 16.9),
        (0.75, 'deploy', 51.1, 9.9),
        (0.50, 'deploy', 65.3, 12.7),
        (0.25, 'deploy', 79.5, 15.5),
    ],
    'ViT-Large': [
        (None, 'vanilla', 304.3, 59.7),
        (0.75, 'training', 304.5, 59.8),
        (0.75, 'deploy', 178.4, 34.9),
    ],
    'ViT-Huge': [
        (None, 'vanilla', 632.2, 124.3),
        (0.75, 'training', 632.5, 124.4),
        (0.75, 'deploy', 369.9, 72.6),
    ],
    'Swin-Tiny': [
        (None, 'vanilla', 28.3, 4.4),
        (1.0, 'deploy', 13.2, 1.9),
        (0.75, 'training', 28.3, 4.4),
        (0.75, 'deploy', 17.5, 2.6),
        (0.50, 'deploy', 21.8, 3.3),
        (0.25, 'deploy', 26.1, 4.0),
    ],
    'Swin-Small': [
        (None, 'vanilla', 49.6, 8.6),
        (1.0, 'deploy', 22.1, 3.7),
        (0.75, 'training', 49.7, 8.6),
        (0.75, 'deploy', 29.9, 5.1),
        (0.50, 'deploy', 37.8, 6.5),
        (0.25, 'deploy', 45.7, 7.9),
    ],
    'Swin-Base': [
        (None, 'vanilla', 87.8, 15.2),
        (1.0, 'deploy', 38.8, 6.5),
        (0.75, 'training', 87.9, 15.2),
        (0.75, 'deploy', 52.8, 9.0),
        (0.50, 'deploy', 66.8, 11.5),
        (0.25, 'deploy', 80.8, 14.0),
    ],
    'LV-ViT-S': [
        (None, 'vanilla', 26.2, 6.1),
        (2 / 3, 'training', 26.2, 6.1),
        (2 / 3, 'deploy', 19.1, 4.7),
    ],
    'LV-ViT-M': [
        (None, 'vanilla', 55.8, 11.9),
        (2 / 3, 'training', 55.9, 11.9),
        (2 / 3, 'deploy', 40.1, 8.8),
    ],
    'PoolFormer-s12': [
        (None, 'vanilla', 12.0, 1.8),
        (0.75, 'training', 11.9, 1.8),
        (0.75, 'deploy', 6.0, 0.8),
        (0.50, 'deploy', 8.4, 1.2),
        (0.25, 'deploy', 10.7, 1.6),
    ],
    'PoolFormer-s24': [
        (None, 'vanilla', 21.4, 3.4),
        (0.75, 'training', 21.4, 3.4),
        (0.75, 'deploy', 9.6, 1.4),
    ],
    'PoolFormer-s36': [
        (None, 'vanilla', 30.9, 5.0),
        (0.75, 'training', 30.9, 5.1),
        (0.75, 'deploy', 13.1, 2.0),
    ],
    'MLPMixer-b16': [
        (None, 'vanilla', 59.9, 12.6),
        (0.75, 'training', 59.9, 12.7),
        (0.75, 'deploy', 24.4, 5.7),
    ],
    'MLPMixer-l16': [
        (None, 'vanilla', 208.2, 44.6),
        (0.75, 'training', 208.4, 44.7),
        (0.75, 'deploy', 82.2, 20.0),
    ],
}

_VIT = ('VisionTransformer', dict(pre_norm=True))
_FAMILIES = {
    'DeiT': _VIT,
    'ViT': _VIT,
    'Swin': ('SwinTransformer', {}),
    'LV-ViT': ('LVViT', dict(out_type='token_label')),
    'PoolFormer': ('PoolFormer', dict(pool_size=7)),
    'MLPMixer': ('MlpMixer', {}),
}
# What only the RePa model has. The released code has the stock attention.
_REPA = {'MLPMixer': dict(token_norm=True), 'Swin': dict(fast_attention=False)}
_ARCHS = {
    'DeiT-Tiny': 'deit-tiny', 'DeiT-Small': 'deit-small',
    'DeiT-Base': 'deit-base', 'ViT-Large': 'large', 'ViT-Huge': 'huge',
    'Swin-Tiny': 'tiny', 'Swin-Small': 'small', 'Swin-Base': 'base',
    'LV-ViT-S': 's', 'LV-ViT-M': 'm', 'PoolFormer-s12': 's12',
    'PoolFormer-s24': 's24', 'PoolFormer-s36': 's36', 'MLPMixer-b16': 'base',
    'MLPMixer-l16': 'large'
}  # yapf: disable


class OnMeta(TorchFunctionMode):
    """Makes tensors without memory, for models of which only shapes matter.

    As ``torch.device('meta')``, but for the few numbers that a model reads
    while it is built: Swin's drop path rates.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        with torch.device('cpu' if func is torch.linspace else 'meta'):
            return func(*args, **(kwargs or {}))


class Counter(TorchFunctionMode):
    """Counts the operations of the models run under it.

    ``macs`` are the multiply-adds of weights. ``profiled`` is what ptflops,
    the profiler of the paper's released code, makes of the same model: the
    multiply-adds of weights, one operation for every bias that is added, two
    for every element that a BatchNorm normalizes, one for LayerNorm and
    softmax, two for every element that goes into an activation or a pooling
    (it sees the module and the function in it), none for PoolFormer's
    GroupNorm (there a class of its own, which it does not know). The attention
    products are in neither.
    """

    def __init__(self) -> None:
        super().__init__()
        self.macs = self.profiled = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        weights = others = 0
        if func is F.linear or func is F.conv2d:
            weight = args[1]
            weights = out.numel() * weight[0].numel()
            bias = args[2] if len(args) > 2 else (kwargs or {}).get('bias')
            others = 0 if bias is None else out.numel()
        elif func in (torch.addmm, torch.Tensor.addmm):
            weights = out.numel() * args[1].shape[1]
        elif func in (torch.mm, torch.Tensor.mm):
            weights = out.numel() * args[0].shape[1]
        elif func is F.batch_norm:
            others = 2 * out.numel()
        elif func is F.layer_norm or func in (F.softmax, torch.softmax, torch.Tensor.softmax):
            others = out.numel()
        elif func in (F.gelu, F.relu, F.avg_pool2d):
            others = 2 * args[0].numel()
        self.macs += weights
        self.profiled += weights + others
        return out


class Row(NamedTuple):
    """One row of the tables. Parameters in millions, operations in 1e9."""

    model: str
    idle_ratio: float | None
    form: str
    reported_params: float
    reported_gmacs: float
    params: float
    gmacs: float
    profiled: float


def build(model: str, idle_ratio: float | None, form: str, num_classes: int = 1000) -> nn.Module:
    """A model of the paper, with its classifier.

    Args:
        model (str): One of ``REPORTED``.
        idle_ratio (float, optional): None for the vanilla model.
        form (str): 'vanilla', 'training' or 'deploy'.
        num_classes (int): Defaults to 1000.

    Returns:
        nn.Module: An mmpretrain ``ImageClassifier``.

    Raises:
        ValueError: If there is no such model.
    """
    if model not in REPORTED:
        raise ValueError(f'model must be one of {", ".join(REPORTED)}, but got {model!r}')
    from mmpretrain.models import ImageClassifier

    family = model.rpartition('-')[0]
    kind, kwargs = _FAMILIES[family]
    cfg = dict(arch=_ARCHS[model], **kwargs)
    if form == 'vanilla':
        cfg['type'] = kind if kind == 'LVViT' else f'mmpretrain.{kind}'
    else:
        cfg.update(
            type=f'RePa{kind}',
            idle_ratio=idle_ratio,
            deploy=form == 'deploy',
            **_REPA.get(family, {}),
        )
    backbone = MODELS.build(cfg)
    pools = kind in ('SwinTransformer', 'PoolFormer', 'MlpMixer')
    arch = getattr(backbone, 'arch_settings', None)
    channels = (
        backbone.num_features[-1]
        if kind == 'SwinTransformer'
        else arch[_ARCHS[model]]['embed_dims'][-1]
        if kind == 'PoolFormer'
        else backbone.embed_dims
    )
    return ImageClassifier(
        backbone,
        neck=dict(type='GlobalAveragePooling', dim=1 if kind == 'MlpMixer' else 2)
        if pools
        else None,
        head=dict(
            type='TokenLabelHead' if kind == 'LVViT' else 'LinearClsHead',
            num_classes=num_classes,
            in_channels=channels,
        ),
    )


def count(model: nn.Module, image_size: tuple[int, int] = (224, 224)) -> Counter:
    """Count the operations of a classifier for one image.

    Args:
        model (nn.Module): An ``ImageClassifier``; its device may be 'meta'.
        image_size (tuple): Height and width. Defaults to (224, 224).
    """
    training = {m: m.training for m in model.modules()}
    model.eval()
    counter = Counter()

    def passed_by(ffn, args, out):
        # Their training form activates all channels and then selects.
        counter.profiled += 2 * ffn.num_idle * (out.numel() // ffn.embed_dims)

    handles = [
        m.register_forward_hook(passed_by) for m in model.modules() if hasattr(m, 'num_idle')
    ]
    try:
        x = torch.zeros(1, 3, *image_size, device=next(model.parameters()).device)
        with torch.no_grad(), counter:
            model(x, mode='tensor')
    finally:
        for handle in handles:
            handle.remove()
        for m, mode in training.items():
            m.training = mode
    return counter


def paper_table(models: list[str] | None = None) -> Iterator[Row]:
    """Every row of the paper's complexity tables, counted.

    Args:
        models (list[str], optional): Only these. Defaults to all.

    Yields:
        Row: In the order of ``REPORTED``.
    """
    for name in REPORTED if models is None else models:
        for idle_ratio, form, params, gmacs in REPORTED[name]:
            with OnMeta():
                model = build(name, idle_ratio, form)
            counter = count(model)
            yield Row(
                name,
                idle_ratio,
                form,
                params,
                gmacs,
                count_parameters(model) / 1e6,
                counter.macs / 1e9,
                counter.profiled / 1e9,
            )


def as_printed(value: float) -> Decimal:
    """A figure as the paper prints it: rounded to two digits, then to one."""
    for digits in ('0.01', '0.1'):
        value = Decimal(str(value)).quantize(Decimal(digits), ROUND_HALF_UP)
    return value


def format_paper_table(rows: Iterable[Row]) -> str:
    """A Markdown table of the rows of :func:`paper_table`."""
    lines = [
        '| model | idle ratio | form | paper: M | ours: M | paper: GMACs | '
        'as profiled there | weights only |',
        '| --- | --- | --- | --- | --- | --- | --- | --- |',
    ]
    for row in rows:
        ratio = '' if row.idle_ratio is None else f'{row.idle_ratio:.2f}'
        lines.append(
            f'| {row.model} | {ratio} | {row.form} | {row.reported_params} | '
            f'{row.params:.2f} | {row.reported_gmacs} | {row.profiled:.2f} | '
            f'{row.gmacs:.2f} |'
        )
    return '\n'.join(lines)
