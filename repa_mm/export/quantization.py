"""Quantization of a checkpoint, calibrated on images."""

import os.path as osp
from collections.abc import Callable, Sequence

import torch
import torch.nn as nn

from repa_mm.export.export import OPSET, whole_onnx
from repa_mm.export.exported import example_shape, model_to_export
from repa_mm.export.quantize import MIN_IMAGES, import_nncf, quantize
from repa_mm.export.sensitivity import sensitivities
from repa_mm.export.session import RUNTIMES
from repa_mm.export.whole import whole_model
from repa_mm.fit.pretrained import CalibrationImages
from repa_mm.run.config import load_config

#: What all layers in 8 bits may cost: a cosine of 1 - 1e-3.
MAX_ERROR = 2e-3
#: Images that the table of sensitivities is made on, and the most pixels of their sides: every
#: layer runs the model once.
TABLE_IMAGES, TABLE_SIDE = 2, 448


def quantize_checkpoint(
    config: str,
    checkpoint: str,
    out: str,
    num_images: int = 64,
    images: str | None = None,
    shortcut: str = 'outside',
    max_error: float = MAX_ERROR,
    preprocessing: bool = False,
    shape: Sequence[int] | None = None,
    batch: int = 1,
    progress: Callable | None = None,
) -> dict:
    """Write a whole model with products of 8 bits, for OpenVINO.

    Args:
        config (str): Path of the config.
        checkpoint (str): Path of a checkpoint, of floats, in either form.
        out (str): The file to write, '.xml'; its weights are in '.bin'.
        num_images (int): Number of images to calibrate on. Defaults to 64.
        images (str, optional): A folder of images. Defaults to the config's training data, through
            its test pipeline.
        shortcut (str): 'outside' the merged matrices, or 'inside'. Defaults to 'outside', since a 1
            on the diagonal of a matrix takes most of the range of its 8 bits.
        max_error (float): What the layers in 8 bits may cost together, as a share of the squares
            of the outputs; those that cost most stay in float until the others do. Defaults to
            2e-3: a cosine of 0.999 between the outputs and those of float.
        preprocessing (bool): Normalize images in the graph. Defaults to False.
        shape (Sequence[int], optional): Height and width that the file is to be fixed to, whatever
            the size of the images to calibrate on. Defaults to None: any.
        batch (int): Number of images that the file is fixed to, if there is a shape. Defaults to 1.
        progress (Callable, optional): Called with 'sensitivity', the number of layers that are
            done, and their number.

    Returns:
        dict: ``errors`` (see :func:`~repa_mm.export.sensitivity.sensitivities`), ``kept`` (names of
        the layers in float), ``images`` (their number) and ``quantizers`` (theirs).

    Raises:
        FileNotFoundError, CheckpointError: If something is missing, or does not fit.
        ValueError: If the images are too few, or an option is out of range.
        ImportError: If OpenVINO or NNCF is not installed.
        OSError: If ``out`` cannot be written.
    """
    if osp.splitext(checkpoint)[1] in RUNTIMES:
        raise ValueError(
            f'{checkpoint!r} is an exported or quantized model: quantization begins with a '
            'checkpoint, a .pth file'
        )
    if not max_error >= 0:
        raise ValueError(f'--max-error must not be negative, but is {max_error}')
    if num_images < MIN_IMAGES:
        raise ValueError(
            f'{num_images} image{"s" * (num_images != 1)} to calibrate on are too few: at least '
            f'{MIN_IMAGES}, better 64'
        )
    if batch < 1:
        raise ValueError(f'--batch must be at least 1, but is {batch}')
    import_nncf()
    source = CalibrationImages(load_config(config), num_images, images)
    model = model_to_export(config, checkpoint, shortcut=shortcut)
    whole = whole_model(model, preprocessing)
    batches, tensors = [], []
    for sample in source:
        normalized = model.data_preprocessor(sample, False)['inputs']
        if len(tensors) < TABLE_IMAGES:
            top, left = (max(size - TABLE_SIDE, 0) // 2 for size in normalized.shape[2:])
            tensors.append(
                normalized[..., top : top + TABLE_SIDE, left : left + TABLE_SIDE].contiguous()
            )
        if preprocessing:
            pixels = sample['inputs'][0].permute(1, 2, 0)[None].byte().contiguous()
            batches.append(pixels.numpy())
        else:
            batches.append(normalized.numpy())
    errors = sensitivities(model, what_counts, tensors, progress)
    kept = costliest(errors, max_error)
    content = whole_onnx(whole, (2, *example_shape(whole)), True, OPSET)
    fixed = None if shape is None else (batch, *shape)
    quantizers = quantize(content, batches, out, kept, fixed)
    return dict(errors=errors, kept=kept, images=len(batches), quantizers=quantizers)


def costliest(errors: dict[str, float], max_error: float) -> list[str]:
    """The fewest layers without which the errors of the others add up to no more than an error."""
    rest, kept = sum(errors.values()), []
    for name, error in sorted(errors.items(), key=lambda item: -item[1]):
        if rest <= max_error:
            break
        kept.append(name)
        rest -= error
    return kept


def what_counts(model: nn.Module, image: torch.Tensor) -> list[torch.Tensor]:
    """The maps of scores and boxes of a detector, or the scores of another model."""
    if hasattr(model, 'decode_head'):
        return [model.decode_head(model.extract_feat(image))]
    head = getattr(model, 'bbox_head', None) or getattr(model, 'rpn_head', None)
    if head is None:
        return [model(image)]
    features = model.extract_feat(image)
    maps = [x for group in head(features) for x in group]
    # Of the second stage only its inputs count: what it looks at depends on the first.
    return maps if hasattr(model, 'bbox_head') else [*features, *maps]
