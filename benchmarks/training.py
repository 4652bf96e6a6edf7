r"""Training steps of whole models, of backbones, and of one FFN by its training path.

Weights are random, images and targets synthetic. A step is a forward and a backward pass::

    python -m benchmarks.training configs/retinanet_repa_swin_b.py \
        --baseline configs/retinanet_swin_b.py --part backbone
    python -m benchmarks.training    # one FFN of several sizes, deployed and in training
"""

import argparse
import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from mmcv.cnn.bricks.transformer import FFN
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.model import revert_sync_batchnorm

from benchmarks.shares import add_arguments
from repa_mm.apis import open_model
from repa_mm.apis.images import input_channels
from repa_mm.benchmark.latency import latency_rows
from repa_mm.benchmark.timing import compare, measure, show, show_machine
from repa_mm.benchmark.variants import DEPLOY, STOCK, autocasting
from repa_mm.io.configs import load_config
from repa_mm.reparam import ChannelIdleFFN, reparameterize, set_training_path_

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
PATHS = 'literal', 'folded', 'auto'
TRAINED = ('literal', 'auto') if DEVICE == 'cpu' else PATHS  # by a whole model
# (N, C): tokens and channels of one FFN, as in the stages of Swins.
FFN_SHAPES = (8192, 128), (8192, 256), (8192, 512), (2048, 1024), (1568, 512), (392, 1024)
if DEVICE == 'cuda':  # two images of 800 x 1344
    FFN_SHAPES = (134400, 128), (33600, 256), (8400, 512), (2100, 1024)
# As in the encoder of a DINO, of an image of 800 x 1344.
ENCODER_SHAPE = 22323, 256


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Compute a whole model's losses of a preprocessed batch, or the mean squares of its outputs.

    Args:
        model (nn.Module): In training mode.
        batch (dict | Tensor): What a data preprocessor returns, for a whole model; or images.
    """
    if isinstance(batch, dict):
        return model.parse_losses(model(**batch, mode='loss'))[0]
    outputs = model(batch)
    outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    return sum(output.pow(2).mean() for output in outputs)


def step(model: nn.Module, dtype: str | None = None, device: str = DEVICE) -> Callable:
    """Return a training step without that of an optimizer, under autocast to ``dtype``."""
    forward = autocasting(partial(loss, model), dtype, device)

    def run(batch: Any) -> None:
        forward(batch).backward()
        model.zero_grad()

    return run


def peak_memory(call: Callable, argument: Any) -> float:
    """Return what a call allocates on the GPU at its peak, beside what is there before, in GiB."""
    argument = copy.deepcopy(argument)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call(argument)
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def training_variants(
    cfg: Config, baseline: Config | None = None, paths: Sequence[str] = TRAINED
) -> dict[str, nn.Module]:
    """Build the models to train, in training mode, with random weights.

    Returns:
        dict: The stock counterpart; the model of ``cfg`` by the 'literal' training path, which
        computes every hidden channel, and by 'auto', which a training takes. On a GPU, the
        model is also measured by 'folded'.
    """
    models = {} if baseline is None else {STOCK: open_model(baseline)}
    model = open_model(cfg)
    for path in paths:
        models[path] = set_training_path_(copy.deepcopy(model), path)
    for name, model in models.items():
        models[name] = revert_sync_batchnorm(model)
        models[name].train()
    return models


class StockFFN(nn.Module):
    """x + W2 GELU(W1 LayerNorm(x)), on tokens (..., C)."""

    def __init__(self, embed_dims: int, feedforward_channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(embed_dims),
            nn.Linear(embed_dims, feedforward_channels),
            nn.GELU(),
            nn.Linear(feedforward_channels, embed_dims),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def measure_ffn(
    num_tokens: int, embed_dims: int, repeats: int, encoder: bool = False, dtype: str | None = None
) -> dict[str, float]:
    """Time one FFN (idle ratio 0.75) beside an ordinary one.

    Args:
        num_tokens (int): Number of tokens N.
        embed_dims (int): Number of channels C.
        repeats (int): Number of turns.
        encoder (bool): Whether it is that of a DETR's encoder: without norms, with a ReLU and a
            hidden width of 8C, beside mmcv's. Otherwise it has norms, a GELU and a hidden width of
            4C, beside one with a LayerNorm. Defaults to False.
        dtype (str, optional): Of autocast, 'float16' or 'bfloat16'. Defaults to None.

    Returns:
        dict: Times as ratios to that of the ordinary FFN: of a forward pass for the deploy form, of
        a forward and backward pass for each training path.
    """
    torch.manual_seed(0)
    if encoder:
        own = dict(act_cfg=dict(type='ReLU'), norm_cfg=None)
        stock = FFN(embed_dims, 8 * embed_dims).to(DEVICE)
        ffn = ChannelIdleFFN(embed_dims, 8 * embed_dims, 0.75, **own).to(DEVICE)
    else:
        stock = StockFFN(embed_dims, 4 * embed_dims).to(DEVICE)
        ffn = ChannelIdleFFN(embed_dims, 4 * embed_dims, 0.75).to(DEVICE)
    x = torch.randn(1, num_tokens, embed_dims, device=DEVICE)
    paths = {path: set_training_path_(copy.deepcopy(ffn), path) for path in PATHS}

    def both_ways(model: nn.Module) -> Callable:
        forward = autocasting(model, dtype, DEVICE)

        def run(x: torch.Tensor) -> None:
            y = forward(x.requires_grad_())
            y.backward(x.detach().to(y))
            model.zero_grad()

        return run

    with torch.no_grad():
        calls = {STOCK: stock, DEPLOY: reparameterize(ffn.eval())}
        calls = {name: autocasting(call, dtype, DEVICE) for name, call in calls.items()}
        inference = measure(calls, x, repeats)
    calls = {name: both_ways(model.train()) for name, model in {STOCK: stock, **paths}.items()}
    training = measure(calls, x, repeats)
    found = {DEPLOY: compare(inference[DEPLOY], inference[STOCK])[0]}
    return {**found, **{path: compare(training[path], training[STOCK])[0] for path in PATHS}}


def show_ffns(repeats: int, dtype: str | None = None) -> None:
    """Print a table of single FFNs, under autocast to ``dtype``."""
    rows = []
    for tokens, channels in (*FFN_SHAPES, ENCODER_SHAPE):
        encoder = (tokens, channels) == ENCODER_SHAPE
        found = measure_ffn(tokens, channels, repeats, encoder, dtype)
        name = f'{tokens}, {channels}' + ' (DETR)' * encoder
        rows.append([name, *(f'{found[key]:.2f}' for key in (DEPLOY, *PATHS))])
    columns = 'N, C', DEPLOY, *(f'training, {path}' for path in PATHS)
    show(f'Time of one FFN, {dtype or "float32"}, ratio to an ordinary one', columns, rows)


def synthetic_batch(model: nn.Module, shape: tuple[int, int], batch_size: int) -> dict[str, Any]:
    """Return images of noise with targets, as input of a data preprocessor.

    An image has ten objects, a label map or a class.

    Args:
        model (nn.Module): A detector, segmentor or classifier with its config in ``cfg``.
        shape (tuple): Height and width of the images in pixels.
        batch_size (int): Number of images.

    Returns:
        dict: ``inputs``, images (C, H, W) of type uint8 in a list or stacked, and ``data_samples``.
    """
    scope, size = model.cfg.default_scope, (input_channels(model), *shape)
    if scope == 'mmdet':
        from mmdet.testing import demo_mm_inputs

        with_mask = bool(getattr(getattr(model, 'roi_head', None), 'with_mask', False))
        return demo_mm_inputs(batch_size, size, [10] * batch_size, with_mask=with_mask)
    rng = np.random.default_rng(0)
    images = [
        torch.from_numpy(image) for image in rng.integers(0, 256, (batch_size, *size), np.uint8)
    ]
    if scope == 'mmseg':
        from mmengine.structures import PixelData
        from mmseg.structures import SegDataSample

        meta = dict(img_shape=shape, ori_shape=shape, pad_shape=shape)
        samples = [SegDataSample(metainfo=meta) for _ in images]
        for sample in samples:
            labels = rng.integers(0, model.decode_head.num_classes, (1, *shape))
            sample.gt_sem_seg = PixelData(data=torch.from_numpy(labels))
        return dict(inputs=images, data_samples=samples)
    from mmpretrain.structures import DataSample

    labels = rng.integers(0, model.head.num_classes, batch_size)
    samples = [DataSample().set_gt_label(int(label)) for label in labels]
    return dict(inputs=torch.stack(images), data_samples=samples)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', nargs='?')
    add_arguments(parser)
    parser.add_argument('--amp', choices=('float16', 'bfloat16'), help='train under autocast')
    args = parser.parse_args()
    show_machine()
    if args.config is None:
        return show_ffns(args.repeats, args.amp)
    MMLogger.get_current_instance().setLevel('WARNING')
    cfg = load_config(args.config)
    baseline = load_config(args.baseline) if args.baseline else None
    models = training_variants(cfg, baseline)
    models = {name: model.to(DEVICE) for name, model in models.items()}
    if args.part == 'model':
        model = next(iter(models.values()))
        batch = synthetic_batch(model, tuple(args.input_shape), args.batch_size)
        batch = model.data_preprocessor(batch, True)
    else:
        batch = torch.randn(args.batch_size, 3, *args.input_shape, device=DEVICE)
        models = {name: model.backbone for name, model in models.items()}
    steps = {name: step(model, args.amp) for name, model in models.items()}
    times = measure(steps, batch, args.repeats)
    rows = [[*row.values()][:4] for row in latency_rows(times, args.batch_size)]
    columns = ['training step', 'ms', 'images/s', 'against stock']
    if DEVICE == 'cuda':
        columns.append('peak, GiB')
        for row, call in zip(rows, steps.values()):
            row.append(f'{peak_memory(call, batch):.2f}')
    title = f'{args.config}, {args.amp or "float32"}, medians of {args.repeats} turns [95 %]'
    show(title, columns, rows)


if __name__ == '__main__':
    main()
