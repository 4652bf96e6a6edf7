"""Narrowing the FFNs and attention heads of a trained checkpoint, and of its config."""

import os.path as osp
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn as nn
from mmengine.runner.checkpoint import weights_to_cpu

from repa_mm.apis import open_model, read_images
from repa_mm.apis.features import check_same
from repa_mm.apis.images import cropped, evenly
from repa_mm.convert.conversion import Conversion
from repa_mm.convert.conversion_report import BlockReport
from repa_mm.io.checkpoints import load_checkpoint
from repa_mm.io.configs import load_config
from repa_mm.io.files import replacing
from repa_mm.version import __version__


def split_images(images: Sequence) -> tuple[list, list]:
    """Split images into those to fit to, and one in nine, from all over them, to hold out."""
    number = min(max(1, len(images) // 9), len(images) - 1)
    held_out = evenly(2 * number, range(len(images)))[1::2]
    to_fit = [image for i, image in enumerate(images) if i not in held_out]
    return to_fit, [images[i] for i in held_out]


def cropped_batches(model: nn.Module, images: Sequence[dict]) -> list[dict]:
    """Return what a model's data preprocessor makes of crops of images."""
    return [model.data_preprocessor(cropped(data), False) for data in images]


def conversion_of(model: nn.Module, images: Sequence[dict], **options) -> Conversion:
    """Return the conversion of a whole model, fitted to crops of images.

    Multiply-adds are counted on the whole image of median size. The model, a detector, segmentor or
    classifier with ordinary FFNs or in its deploy form, is from :func:`~repa_mm.apis.open_model`,
    the images are from :func:`~repa_mm.apis.read_images`. Options are as for :class:`Conversion`.
    """
    by_size = sorted(images, key=lambda data: data['inputs'][0].numel())
    middle = by_size[len(images) // 2 :][:1]
    full_size = [model.data_preprocessor(data, False) for data in middle]
    return Conversion(model, cropped_batches(model, images), full_size=full_size, **options)


def convert_checkpoint(
    config: str,
    checkpoint: str,
    out: str,
    budget: float | None = None,
    num_images: int = 64,
    images: str | None = None,
    device: str | None = None,
    cfg_options: dict | None = None,
    progress: Callable[[BlockReport, int, float], None] | None = None,
    **options,
) -> dict:
    """Convert a trained checkpoint; ``tools/convert_pretrained.py --help`` explains the options.

    Necks and the heads of detectors stay as they are. Channel-idle FFNs merge first. A config is
    written beside the checkpoint, so that both are ready for tests and training.

    Returns:
        dict: ``report`` (with the differences of the heads' inputs), ``images`` and ``held_out``
        (numbers of images), and ``config`` (path of the written config).
    """
    out_config = f'{osp.splitext(out)[0]}.py'
    if len({osp.realpath(path) for path in (config, checkpoint, out, out_config)}) < 4:
        raise ValueError(f'{out!r} or its config {out_config!r} would replace a file that is read')
    cfg = load_config(config, cfg_options)
    model = open_model(cfg, checkpoint, merge=True)  # only the deploy form is worth narrowing
    number = num_images + max(1, num_images // 8)
    to_fit, held_out = split_images(read_images(cfg, 'train', number, images))
    model.to(device or ('cuda' if torch.cuda.is_available() else 'cpu'))
    conversion = conversion_of(model, to_fit, **options)
    batches = cropped_batches(model, held_out)
    narrow, report = conversion.fit(conversion.sizes(budget), batches, progress)
    # Training starts from the converted weights.
    narrow.cfg.load_from, narrow.cfg.resume = osp.abspath(out), False
    save_model(narrow, checkpoint, out, (held_out or to_fit)[0])
    return dict(report=report, images=len(to_fit), held_out=len(held_out), config=out_config)


def save_model(model: nn.Module, original: str, out: str, data: dict) -> None:
    """Write a converted model to '….pth', and the config in its ``cfg`` to '….py'.

    The ``meta`` of ``original``, the checkpoint of the original model, stays. Both files are opened
    again first, and compared with the model on ``data``, a batch of one image from a data loader.

    Raises:
        ValueError: If the files, opened again, compute something else. Nothing is written then.
    """
    text = model.cfg.pretty_text
    # MMEngine's inferencers read the config from the checkpoint if they are given weights alone.
    meta = load_checkpoint(original).get('meta') or {}
    meta = dict(meta, repa_mm_version=__version__, cfg=text)
    with replacing(out) as weights, replacing(f'{osp.splitext(out)[0]}.py') as config:
        torch.save(dict(meta=meta, state_dict=weights_to_cpu(model.state_dict())), weights)
        Path(config).write_text(text, encoding='utf-8')
        written = open_model(config, weights).to(next(model.parameters()).device)
        check_same(written, model, cropped(data), out)
