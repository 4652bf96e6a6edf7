r"""Training steps of whole models and of backbones, by training path.

Weights are random, images and targets synthetic. A step is a forward and a backward pass::

    python -m benchmarks.training configs/retinanet_repa_swin_b.py \
        --baseline configs/retinanet_swin_b.py --part backbone
"""

import argparse
import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.model import revert_sync_batchnorm

from repa_mm.apis import open_model
from repa_mm.apis.images import input_channels
from repa_mm.io.configs import load_config
from repa_mm.measure.latency import latency_rows
from repa_mm.measure.timing import measure, show, show_machine
from repa_mm.measure.variants import STOCK, autocasting
from repa_mm.reparam import set_training_path_

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
# Training paths to measure.
TRAINED = ('literal', 'auto') if DEVICE == 'cpu' else ('literal', 'folded', 'auto')


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
    parser.add_argument('config')
    parser.add_argument('--baseline', metavar='CONFIG', help='of the stock model')
    parser.add_argument(
        '--part', choices=('model', 'backbone'), default='model', help='%(default)s'
    )
    parser.add_argument(
        '--input-shape', type=int, nargs=2, default=[800, 1344], help='of images (800 1344)'
    )
    parser.add_argument('--batch-size', type=int, default=1, help='%(default)s')
    parser.add_argument('--repeats', type=int, default=10, help='number of turns (%(default)s)')
    parser.add_argument('--amp', choices=('float16', 'bfloat16'), help='train under autocast')
    args = parser.parse_args()
    show_machine()
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
