"""The content of ONNX files, for models that agree with PyTorch."""

import copy
import io
import warnings
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from repa_mm.export.comparison import agreement
from repa_mm.export.runtime_model import ExportedModel
from repa_mm.export.whole import WholeModel, whole_model

OPSET = 17
# Largest share of differing objects or pixels, or difference of a score, to accept.
TOLERANCES = dict(
    detection=0.02, instances=0.02, panoptic=5e-3, segmentation=1e-3, classification=1e-4
)
#: Images to compare on.
NUM_IMAGES = 3


def example_shape(model: nn.Module) -> tuple[int, int]:
    """Return the height and width of an example to trace a model with, for images of any size.

    The size differs from the model's own, so that position embeddings are resized.
    """
    made_for = getattr(getattr(model, 'backbone', None), 'img_size', None)
    height, width = made_for if isinstance(made_for, (list, tuple)) else (224, 224)
    return height + 32, width + 64


def agreeing_onnx(
    model: nn.Module,
    images: Sequence[dict],
    shape: Sequence[int] | None = None,
    preprocessing: bool = False,
) -> tuple[bytes, float]:
    """Return the content of an ONNX file of a whole model, from images to predictions.

    The file takes any number of images. Its predictions are compared with ``model.test_step`` on
    images of several sizes and numbers. Of a detector a second file is compared, which has no score
    threshold: in a few images, trained detectors find few objects. Metadata in the file describes
    its inputs and outputs, see :class:`~repa_mm.export.Session`.

    Args:
        model (nn.Module): A detector, segmentor or classifier in eval mode, on any device.
        images (Sequence[dict]): Batches of one image, as from a data loader, on which to compare.
        shape (Sequence[int], optional): Height and width that images must have. Defaults to None:
            any.
        preprocessing (bool): Take uint8 images (B, H, W, C) as OpenCV reads them, and normalize
            them in the graph. Defaults to False, which takes normalized images (B, C, H, W).

    Returns:
        tuple: The content, and the largest difference from PyTorch in a batch: 1 minus the exact
        :func:`~repa_mm.export.agreement`.

    Raises:
        ValueError: If the file would not agree with the model.
    """
    models = [model, *_without_threshold(model)]
    wholes = [whole_model(m, preprocessing) for m in models]
    (whole, *_), (height, width) = wholes, shape or example_shape(model)
    if shape is None:
        larger, other = (height + 64, width + 32), (width + 65, height)
        mixed = [(height, width), larger if whole.task == 'detection' else (height, width)]
        batches = [images[0], *(resized(images, s) for s in (mixed, [larger], [other] * 3))]
    else:
        scale = 1.5 if whole.slides else 1  # several windows
        size = round(scale * height), round(scale * width)
        batches = [resized(images, [size] * number) for number in (1, 2)]
    example = 2, len(images[0]['inputs'][0]), height, width
    contents = [whole_onnx(m, example, shape is None) for m in wholes]
    *limited, last = (_differences(*pair, batches) for pair in zip(models, contents))
    # NaN where no box is above the threshold, for either.
    differences = torch.cat([*(x.nan_to_num() for x in limited), last])
    error = differences.max().item()  # NaN if there is a NaN
    if not error <= TOLERANCES[whole.task]:
        raise ValueError(
            f'the exported model differs from PyTorch by {error:.1e}, more than '
            f'{TOLERANCES[whole.task]:.0e}: nothing is written'
        )
    return contents[0], error


def _differences(model: nn.Module, content: bytes, batches: Sequence[dict]) -> torch.Tensor:
    """Return the difference of an ONNX file's content from PyTorch on each batch."""
    exported = ExportedModel(content, model.data_preprocessor)
    return torch.tensor([1 - agreement(model, exported, [data], exact=True) for data in batches])


def _without_threshold(model: nn.Module) -> list[nn.Module]:
    """Return a copy of a detector without its score threshold, if it has one."""
    for name in ('roi_head', 'bbox_head'):
        cfg = getattr(getattr(model, name, None), 'test_cfg', None) or {}
        if cfg.get('score_thr'):
            model = copy.deepcopy(model)
            getattr(model, name).test_cfg['score_thr'] = 0.0
            return [model]
    return []


def resized(images: Sequence[dict], sizes: Sequence[tuple[int, int]]) -> dict:
    """Return a batch of images, resized to ``sizes`` (height, width), as from a data loader."""
    inputs, samples = [], []
    for i, size in enumerate(sizes):
        data = images[i % len(images)]
        image = data['inputs'][0]
        pixels = F.interpolate(image[None].float(), tuple(size), mode='bilinear')
        inputs.append(pixels[0].to(image.dtype))
        samples.append(copy.deepcopy(data['data_samples'][0]))
        samples[-1].set_metainfo(
            dict(
                dict.fromkeys(('img_shape', 'pad_shape', 'ori_shape'), tuple(size)),
                scale_factor=(1.0, 1.0),
            )
        )
    return dict(inputs=inputs, data_samples=samples)


def whole_onnx(model: WholeModel, shape: Sequence[int], any_size: bool = True) -> bytes:
    """Return the content of an ONNX file, which takes any number of images.

    Args:
        model (WholeModel): From :func:`~repa_mm.export.whole_model`.
        shape (Sequence[int]): Of an example: number of images, at least 2 since tracing fixes a
            dimension of size 1; channels, height and width.
        any_size (bool): Accept other heights and widths. Defaults to True.
    """
    import onnx

    inputs, names = [model.example(*shape)], ['image']
    axes = {name: {0: 'batch'} for name in ('image', *model.outputs)}
    if any_size:
        height, width = (1, 2) if model.preprocessing.in_graph else (2, 3)
        axes['image'].update({height: 'height', width: 'width'})
    if model.option:
        name, value = model.option
        inputs.append(torch.tensor(value))
        names.append(name)
        if model.task == 'detection':  # one size for all images, or one size each
            axes[name] = {0: 'sizes'}
    content = to_onnx(
        model, tuple(inputs), input_names=names, output_names=list(model.outputs), dynamic_axes=axes
    )
    proto = onnx.load_from_string(content)
    if model.option:  # an input with an initial value can be left out
        value = np.array(model.option[1], np.int64)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, model.option[0]))
    onnx.helper.set_model_props(proto, model.metadata())
    return proto.SerializeToString()


def to_onnx(model: nn.Module, inputs: tuple, **kwargs) -> bytes:
    """Return the content of an ONNX file, from PyTorch's tracing exporter."""
    # The tracing exporter needs no onnxscript, and takes a second.
    if 'dynamo' in torch.onnx.export.__code__.co_varnames:
        kwargs['dynamo'] = False
    file = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter('ignore')
        torch.onnx.export(model, inputs, file, opset_version=OPSET, **kwargs)
    return file.getvalue()
